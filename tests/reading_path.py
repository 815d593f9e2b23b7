"""Prints every file of Canter whose functions one iteration of PPO calls, a line each.

Feed-forward PPO on `tensor:pendulum` by the definition: the autograd engine, and the plain functions instead of the
kernels that stand for them on some machines. Importing and building are not counted.
"""

import sys
from pathlib import Path

import canter
from canter.functional.adam import adam_step_

SOURCE = Path(canter.__file__).parent


def files_of_an_iteration():
    """Files whose code runs in one collection and one update, relative to the package."""
    env = canter.EnvConfig(id="tensor:pendulum", num_envs=8)
    algorithm = canter.PPOConfig(horizon=16, epochs=2, num_minibatches=2)
    execution = canter.ExecutionConfig(engine="autograd", mode="eager")
    programs = canter.Trainer(canter.TrainConfig(env=env, algorithm=algorithm, execution=execution)).programs
    adam_step_.kernels.clear()  # those in C, where they were built
    called = set()
    sys.settrace(lambda frame, event, argument: called.add(frame.f_code.co_filename))
    try:
        programs.update(programs.collect())
    finally:
        sys.settrace(None)
    paths = [Path(name) for name in called]
    return sorted(str(path.relative_to(SOURCE)) for path in paths if path.is_relative_to(SOURCE))


if __name__ == "__main__":
    print("\n".join(files_of_an_iteration()))
