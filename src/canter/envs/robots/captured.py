"""mjlab's step (1.6), in segments that are recorded once as CUDA graphs and then replayed.

How it works, in ten sentences:

1. A step of mjlab launches hundreds of small operations from Python, and launching them takes
   longer than their work.
2. `CapturedStep` runs them in the same order, in segments: actions, substeps, terminations,
   rewards, interval events, resets, commands, rays and observations; the physics between them has
   separate graphs (`replacements.Physics`).
3. A segment first runs eagerly, is then recorded as a CUDA graph (`recording.py`), and is replayed
   from then on (`segments.py`).
4. A graph repeats work on the device only, so what the segment did in Python is found by comparing
   the managers' objects before and after, and is repeated after every replay: assignments and log
   entries (`host_state.py`).
5. A graph reads fixed addresses, so a new tensor that replaced an old one is copied into the memory
   of the old one.
6. Asking which environments satisfy a condition waits for the device, so methods write under masks
   (`replacements.py`), or read the indices that `EnvIndices` transfers once per step.
7. Between replays may change: the contents of tensors; the number of environments that a segment
   works on, with a graph for each; and flags that were seen to vary, with a graph for each state.
8. All graphs are deleted if a setting changes outside the segments, as by a curriculum
   (`Segments.check_guards`), or if the number of masks changes; a single graph is not used while a
   cache of a sensor that it reads has been replaced.
9. A segment runs eagerly for good if it waits for the device, uses a counter of the environment,
   depends on a number that changes in every step, or if one of its first two graphs differs from
   the eager run in any bit; the log says so.
10. `tests/envs/test_mjlab.py` compares whole steps with mjlab's own on a CPU, and
    `benchmarks/robots/mjlab_captured.py` compares every replay with the eager segment on a GPU.

N environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from canter.envs.robots.host_state import Roots
from canter.envs.robots.recording import CudaRecorder, NotCapturable, Recorder
from canter.envs.robots.replacements import Physics, use_masks
from canter.envs.robots.segments import Segments

COUNTERS = ("common_step_counter", "_sim_step_counter")
"""Counters of the environment in Python, which differ in every step."""
MANAGERS = ("action", "observation", "reward", "termination", "command", "event", "metrics")
RESET_MANAGERS = ("observation", "action", "reward", "metrics", "command", "event", "termination")
"""Managers in the order of mjlab's reset; curricula follow them."""


class CapturedStep:
    """Steps a `ManagerBasedRlEnv` like its own `step`; called with actions `[N, A]`.

    Tests pass a `make_recorder` that works without a GPU.
    """

    def __init__(
        self,
        env: Any,
        make_recorder: Callable[[Roots, torch.device], Recorder] = lambda *_: CudaRecorder(),
    ) -> None:
        self.env = env
        self.device = torch.device(env.device)
        use_masks(env)
        roots = _state_of(env)
        self.segments = Segments(
            roots,
            self.device,
            log=lambda: env.extras["log"],
            hide_counters=self._hide_counters,
            record=make_recorder(roots, self.device),
        )
        self.physics = Physics(env.sim)
        self.action = torch.zeros(env.num_envs, env.action_manager.total_action_dim, device=self.device)
        self.step_count = torch.zeros((), dtype=torch.int32, device=self.device)
        """Steps of the environment, on the device, where a graph can read them."""
        self._indices = EnvIndices(env.num_envs, self.device)
        self._results: dict[str, Tensor] = {}
        """Episode ends and rewards, each at one address for all graphs that compute it."""

    @torch.no_grad()
    def __call__(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Return the results of mjlab's `step`; the next step overwrites them."""
        env = self.env
        if not env.cfg.auto_reset and bool(env._manual_reset_pending.any()):
            raise RuntimeError("ended environments must be reset before the next step (auto_reset=False)")
        self.segments.check_guards()
        env.extras["log"] = {}
        self.action.copy_(action)
        self._run_and_count_writes("actions", self._actions)
        for i in range(env.cfg.decimation):
            env._sim_step_counter += 1
            self.physics.step()
            if i + 1 < env.cfg.decimation:
                self.segments.run("substeps", self._substep)
        env.common_step_counter += 1
        self.step_count.fill_(env._sim_step_counter // env.cfg.decimation)
        env.reset_buf = self._at_fixed_address("reset_buf", self.segments.run("terminations", self._terminations))
        env.reset_terminated = env.termination_manager.terminated
        env.reset_time_outs = env.termination_manager.time_outs
        # One transfer for all masks, before the rewards: the device computes them while the host
        # receives the indices, and later works on what follows while the host launches the rest of
        # this step and the next.
        events = self._due_events()
        commands = self._due_commands()
        if self._indices.resize(len(events) + len(commands) + 1):
            self.segments.forget()
        self._indices.request(*events, *commands, env.reset_buf)
        env.reward_buf = self._at_fixed_address("reward_buf", self.segments.run("rewards", self._rewards))
        *due, ended = self._indices.receive()
        self._apply_events(tuple(due[: len(events)]))
        self._reset(ended)
        self.physics.forward()
        self._update_commands(tuple(due[len(events) :]))
        self._sense()
        env.obs_buf = self._run_and_count_writes("observations", self._observations)
        if len(ended) and env.cfg.auto_reset:
            env.recorder_manager.record_post_reset(ended)
        elif len(ended):
            env._manual_reset_pending[ended] = True
        env.recorder_manager.record_post_step()
        return env.obs_buf, env.reward_buf, env.reset_terminated, env.reset_time_outs, env.extras

    def about(self) -> str:
        """Return which segments are captured, and why the others are not."""
        lines = [f"captured: {', '.join(self.segments.captured()) or 'nothing yet'}"]
        lines += [f"{name} eagerly ({reason})" for name, reason in self.segments.dropped.items()]
        if self.physics.full_step_reason is not None:
            lines.append(f"every step of physics computes `forward` again ({self.physics.full_step_reason})")
        return "; ".join(lines)

    def _run_and_count_writes(
        self, name: str, segment: Callable[[], Any], env_ids: tuple[Tensor, ...] = (), *, finds_env_ids: bool = False
    ) -> Any:
        """Run a segment between `forward` and the next step of physics; notice its writes."""
        before = self.physics.count_writes()
        output = self.segments.run(name, segment, env_ids, finds_env_ids=finds_env_ids)
        if self.segments.restored or not self.segments.replayed:
            self.physics.attribute_writes(name, before, restored=self.segments.restored)
        return output

    def _at_fixed_address(self, name: str, result: Tensor) -> Tensor:
        if name not in self._results:
            self._results[name] = torch.empty_like(result)
        return self._results[name].copy_(result)

    # Segments in the order of a step
    # ----------------------------------------------------------------------------------

    def _actions(self) -> None:
        self.env.action_manager.process_action(self.action)
        self._write_controls()

    def _write_controls(self) -> None:
        self.env.action_manager.apply_action()
        self.env.scene.write_data_to_sim()

    def _substep(self) -> None:
        self._update_scene()
        self._write_controls()

    def _update_scene(self) -> None:
        self.env.scene.update(dt=self.env.physics_dt)
        self.env.metrics_manager.compute_substep()

    def _terminations(self) -> Tensor:
        self._update_scene()
        self.env.episode_length_buf += 1
        return self.env.termination_manager.compute()

    def _rewards(self) -> Tensor:
        reward = self.env.reward_manager.compute(dt=self.env.step_dt)
        self.env.metrics_manager.compute()
        return reward

    def _due_events(self) -> list[Tensor]:
        """Return a mask `[N]` for each interval event: the environments in which it happens now.

        Empty if an event must determine this itself.
        """
        manager = self.env.event_manager
        terms = manager._mode_term_cfgs.get("interval", ())
        if any(term.is_global_time or getattr(term.func, "recompute", 0) for term in terms):
            return []
        return [left - self.env.step_dt < 1e-6 for left in manager._interval_term_time_left] if terms else []

    def _apply_events(self, due: tuple[Tensor, ...]) -> None:
        """Apply the events of every step, and interval events in the due environments."""
        env = self.env
        manager = env.event_manager
        if "step" in manager.available_modes:
            manager.apply(mode="step", dt=env.step_dt)
        if "interval" not in manager.available_modes:
            return
        if due:
            self.segments.run("interval events", self._interval_events, due, finds_env_ids=True)
        else:
            self._interval_events()

    def _interval_events(self) -> None:
        self.env.event_manager.apply(mode="interval", dt=self.env.step_dt)

    def _reset(self, ended: Tensor) -> None:
        """Reset ended environments. Curricula may change settings, so they always run in Python."""
        env = self.env
        if not env.cfg.auto_reset or not len(ended):
            return
        env.recorder_manager.record_pre_reset(ended)
        env.curriculum_manager.compute(env_ids=ended)
        self._reset_physics()
        self.segments.check_guards()
        if "resets" not in self.segments.dropped:  # one graph for each number of environments, not two
            self.segments.run("resets", self._reset_all, (ended,))
        else:
            self.segments.run("reset events", self._reset_events, (ended,))
            self.segments.run("resets of managers", self._reset_managers, (ended,))
        env.extras["log"].update(env.curriculum_manager.reset(ended))

    def _reset_physics(self) -> None:
        """Reset ended environments like `sim.reset`, with the mask that exists already."""
        sim = self.env.sim
        reset_data = import_module("mujoco_warp").reset_data
        sim._reset_mask.copy_(self.env.reset_buf)
        self._launch(sim.reset_graph, lambda: reset_data(sim.wp_model, sim.wp_data, reset=sim._reset_mask_wp))

    def _reset_all(self) -> None:
        self._reset_events()
        self._reset_managers()

    def _reset_events(self) -> None:
        env = self.env
        env_ids = self.segments.env_ids[0]
        env.scene.reset(env_ids)
        if "reset" in env.event_manager.available_modes:
            env.event_manager.apply(mode="reset", env_ids=env_ids, global_env_step_count=self.step_count)

    def _reset_managers(self) -> None:
        env = self.env
        env_ids = self.segments.env_ids[0]
        for name in RESET_MANAGERS:
            env.extras["log"].update(getattr(env, f"{name}_manager").reset(env_ids))
        env.episode_length_buf[env_ids] = 0
        env._manual_reset_pending[env_ids] = False
        env.scene.write_data_to_sim()

    def _due_commands(self) -> list[Tensor]:
        """Return a mask `[N]` for each command: the environments that get a new one.

        Time advances by a step, except in environments that are being reset: their commands have
        new durations. Empty if a duration may be 0, as such a command changes again at once.
        """
        env = self.env
        dt = env._command_dt
        dt.fill_(env.step_dt)
        if env.cfg.auto_reset:
            dt.masked_fill_(env.reset_buf, 0.0)
        terms = getattr(env.command_manager, "_terms", {}).values()
        if any(term.cfg.resampling_time_range[0] <= 0.0 for term in terms):
            return []
        return [(term.time_left - dt <= 0.0) & (dt > 0.0) for term in terms]

    def _update_commands(self, due: tuple[Tensor, ...]) -> None:
        if due:
            self._run_and_count_writes("commands", self._commands, due, finds_env_ids=True)
        else:
            self._commands()

    def _commands(self) -> None:
        self.env.command_manager.compute(dt=self.env._command_dt)

    def _sense(self) -> None:
        """Cast rays and render cameras; `_observations` reads the results."""
        sim = self.env.sim
        if sim._sensor_context is None:
            return
        self._run_and_count_writes("rays", sim._sensor_context.prepare)
        self._launch(sim.sense_graph, sim._sense_kernel)

    def _observations(self) -> Any:
        if self.env.sim._sensor_context is not None:
            self.env.sim._sensor_context.finalize()
        return self.env.observation_manager.compute(update_history=True)

    def _launch(self, graph: Any, eager: Callable[[], None]) -> None:
        """Launch a graph of the simulation or, if it has none, the function."""
        sim = self.env.sim
        warp = import_module("warp")
        with warp.ScopedDevice(sim.wp_device):
            if sim.use_cuda_graph and graph is not None:
                warp.capture_launch(graph)
            else:
                eager()

    @contextmanager
    def _hide_counters(self) -> Iterator[None]:
        """Refuse segments that use a counter, whose present number a graph would repeat.

        Also let `array[index] = value` write on the current stream. mjlab's method switches to the
        stream of Warp, on which a recording would miss the write, unnoticed; it has no setting for
        this, so the method is replaced here.
        """
        attributes = vars(self.env)
        counts = {name: attributes[name] for name in COUNTERS}
        array = type(self.env.sim.data.qpos)
        setitem = array.__setitem__
        array.__setitem__ = lambda own, index, value: own._tensor.__setitem__(index, value)
        attributes.update({name: HiddenCounter(name) for name in COUNTERS})
        try:
            yield
        finally:
            attributes.update(counts)
            array.__setitem__ = setitem


def _state_of(env: Any) -> Roots:
    """Return the objects of an environment that the segments of a step may change."""
    objects = {name: getattr(env, f"{name}_manager") for name in MANAGERS}
    objects["scene"] = env.scene
    objects["data"] = env.sim._data_bridge
    objects["model"] = env.sim._model_bridge
    objects["env"] = vars(env)
    skipped_ids = {id(env), id(env.sim), id(env.extras), id(env.cfg)}
    return Roots(objects, skipped_ids, frozenset((*COUNTERS, "_env", "extras")))


class HiddenCounter:
    """Stands in for a counter of the environment; any computation with it raises NotCapturable."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: Any) -> Any:
        raise NotCapturable(f"it uses {self.name}")

    __bool__ = __int__ = __index__ = __float__ = __hash__ = __str__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse


class EnvIndices:
    """The indices `[K]` of the environments in which masks `[N]` are true, at fixed addresses.

    `receive` waits for the device once for all masks, and only for the work that was launched
    before `request`.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.num_envs = num_envs
        self.device = device
        self.masks = torch.empty(0)
        self.indices_on_host = torch.empty(0)
        self.indices = torch.empty(0)
        self.transferred = torch.cuda.Event() if device.type == "cuda" else None

    def resize(self, num_masks: int) -> bool:
        """Make room for a number of masks; return whether that changed it, and the addresses."""
        if len(self.masks) == num_masks:
            return False
        shape = (num_masks, self.num_envs)
        pinned = self.device.type == "cuda"
        self.masks = torch.zeros(shape, dtype=torch.bool, pin_memory=pinned)
        self.indices_on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self.indices = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return True

    def request(self, *masks: Tensor) -> None:
        """Start the transfer of the masks to the host."""
        self.masks.copy_(torch.stack(masks), non_blocking=True)
        if self.transferred is not None:
            self.transferred.record(torch.cuda.current_stream(self.device))

    def receive(self) -> tuple[Tensor, ...]:
        """Return the indices of each mask."""
        if self.transferred is not None:
            self.transferred.synchronize()
        counts = []
        for mask, indices in zip(self.masks.numpy(), self.indices_on_host.numpy(), strict=True):
            found = mask.nonzero()[0]
            indices[: len(found)] = found
            counts.append(len(found))
        self.indices.copy_(self.indices_on_host, non_blocking=True)
        return tuple(own[:count] for own, count in zip(self.indices, counts, strict=True))
