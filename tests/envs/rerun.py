"""A stand-in for CUDA graphs on a CPU: a recording is run again, into the tensors that it gave at first.

It shows whether what parts of a step do in Python is kept apart from what they do on the device. It cannot show a graph
that reads a tensor which has since moved; only a GPU can.
"""

from torch import Tensor

from canter.envs.robots.host_state import Effects, Roots, Snapshot


def rerun(roots: Roots, device):
    def record(function):
        before = Snapshot(roots, device)
        results = function()
        for path, tensor in before.tensors.items():  # what Python holds stays, as after a recording
            if 0 not in tensor.stride():
                tensor.copy_(before.copies[path])
        before.generator().set_state(before.generator_state)
        return lambda: copy(results, function()), results

    return record


def copy(to, found):
    if isinstance(to, Tensor):
        to.copy_(found)
    elif isinstance(to, dict):
        for key in to:
            copy(to[key], found[key])
    elif isinstance(to, tuple | list):
        for one, other in zip(to, found, strict=True):
            copy(one, other)
    elif isinstance(to, Effects):
        new = {(id(slot.container), slot.key): value for slot, value in found.assignments}
        for slot, value in to.assignments:
            copy(value, new.get((id(slot.container), slot.key), value))
    elif hasattr(to, "__dict__"):  # what a sensor has measured
        copy(vars(to), vars(found))
