"""Parts of mjlab with masks where they ask for row numbers, so that they can be captured.

They draw the same random numbers in the same order and give the same numbers to the bit; every capture holds them
against the original. K rows are drawn anew, of N.

mjlab's step in parts that are captured as CUDA graphs, around the physics, which has graphs of its own.

N environments. The order of things is that of mjlab's own `step` (1.6); what each manager does stays mjlab's and the
task's. `tests/envs/test_mjlab.py` holds both steps against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from canter.envs.robots.host_state import Roots
from canter.envs.robots.recording import CudaRecorder, Declined, Physics
from canter.envs.robots.segments import Segments

SLOWEST_FORWARD = 0.3
"""Speed that commands to walk straight ahead have at least, in m/s."""
STEEP = 0.1
"""An axis whose part in the plane is shorter than this points up or down."""


def use_masks(env: Any) -> None:
    """Replace methods of commands and sensors of exactly mjlab's classes; all others stay as they are."""
    command = import_module("mjlab.tasks.velocity.mdp.velocity_command").UniformVelocityCommand
    rays = import_module("mjlab.sensor.raycast_sensor").RayCastSensor
    for term in getattr(env.command_manager, "_terms", {}).values():
        if type(term) is command:
            term._resample_command, term._update_command = MethodType(resample, term), MethodType(update, term)
    for sensor in env.scene.sensors.values():
        if getattr(type(sensor), "_extract_yaw_rotation", None) is rays._extract_yaw_rotation:
            sensor._extract_yaw_rotation = yaw_rotation


def resample(term: Any, env_ids: Tensor) -> None:
    """New commands for K rows."""
    cfg = term.cfg

    def draw(low: float, high: float) -> Tensor:
        return torch.empty(len(env_ids), device=term.device).uniform_(low, high)

    x, y, turn = (draw(*span) for span in (cfg.ranges.lin_vel_x, cfg.ranges.lin_vel_y, cfg.ranges.ang_vel_z))
    if cfg.heading_command:
        term.heading_target[env_ids] = draw(*cfg.ranges.heading)
        term.is_heading_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_heading_envs
    term.is_standing_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_standing_envs
    term.is_world_env[env_ids] = draw(0.0, 1.0) <= cfg.rel_world_envs
    term.vel_command_w[env_ids] = torch.stack([x, y, turn], 1)
    forward = draw(0.0, 1.0) <= cfg.rel_forward_envs
    term.is_forward_env[env_ids] = forward
    x = torch.where(forward, x.abs().clamp(min=SLOWEST_FORWARD), x)
    zero = torch.zeros_like(x)
    term.vel_command_b[env_ids] = torch.stack([x, torch.where(forward, zero, y), torch.where(forward, zero, turn)], 1)


def update(term: Any, env_ids: Tensor | None = None) -> None:
    """Turn towards headings, rotate commands of the world's frame, stand still: `[N, 3]` in place."""
    cfg, command, heading = term.cfg, term.vel_command_b, term.robot.data.heading_w
    if cfg.heading_command:
        term.heading_error = import_module("mjlab.utils.lab_api.math").wrap_to_pi(term.heading_target - heading)
        low, high = cfg.ranges.ang_vel_z
        turn = torch.clip(cfg.heading_control_stiffness * term.heading_error, min=low, max=high)
        command[:, 2] = torch.where(term.is_heading_env, turn, command[:, 2])
    cos, sin, (x, y) = torch.cos(heading), torch.sin(heading), term.vel_command_w[:, :2].unbind(1)
    command[:, 0] = torch.where(term.is_world_env, cos * x + sin * y, command[:, 0])
    command[:, 1] = torch.where(term.is_world_env, -sin * x + cos * y, command[:, 1])
    standing = term.is_standing_env.unsqueeze(1)
    command.masked_fill_(standing, 0.0)
    term.vel_command_w.masked_fill_(standing, 0.0)


def yaw_rotation(rotation: Tensor) -> Tensor:
    """Rotations `[N, 3, 3]` about the vertical alone, by where the x axis points, or the y axis where that is steep."""
    flat = rotation[:, :2, :2].clone()
    x, y = torch.zeros_like(rotation[:, :, 0]), torch.zeros_like(rotation[:, :, 0])
    x[:, :2], y[:, :2] = flat[:, :, 0], flat[:, :, 1]
    length = x.norm(dim=1)
    y = y / y.norm(dim=1).clamp(min=1e-6).unsqueeze(-1)
    steep = length < STEEP
    x = torch.where(steep.unsqueeze(-1), torch.stack([y[:, 1], -y[:, 0], y[:, 2]], 1), x)
    x = x / torch.where(steep, 1.0, length).clamp(min=1e-6).unsqueeze(-1)
    turned = torch.zeros_like(rotation)
    turned[:, 0, 0], turned[:, 1, 0], turned[:, 0, 1], turned[:, 1, 1] = x[:, 0], x[:, 1], -x[:, 1], x[:, 0]
    turned[:, 2, 2] = 1.0
    return turned


COUNTERS = ("common_step_counter", "_sim_step_counter")
MANAGERS = ("action", "observation", "reward", "termination", "command", "event", "metrics")


class CapturedStep:
    """Steps a `ManagerBasedRlEnv` as its own `step` does; called with actions `[N, A]`. Tests have another recorder."""

    def __init__(self, env: Any, recorder: Callable[[Roots, torch.device], Any] = lambda *_: CudaRecorder()) -> None:
        self.env, self.device = env, torch.device(env.device)
        use_masks(env)
        objects = {name: getattr(env, f"{name}_manager") for name in MANAGERS}
        objects |= {"scene": env.scene, "data": env.sim._data_bridge, "model": env.sim._model_bridge, "env": vars(env)}
        skipped = {id(env), id(env.sim), id(env.extras), id(env.cfg)}
        keys = frozenset((*COUNTERS, "_env", "extras"))
        roots = Roots(objects, skipped, keys)
        record = recorder(roots, self.device)
        self.segments = Segments(roots, self.device, lambda: env.extras["log"], self._watched, record)
        self.physics = Physics(env.sim)
        self.action = torch.zeros(env.num_envs, env.action_manager.total_action_dim, device=self.device)
        self.count = torch.zeros((), dtype=torch.int32, device=self.device)
        """Steps of the environment so far, where a graph can read them."""
        self._rows = Rows(env.num_envs, self.device)
        self._results: dict[str, Tensor] = {}
        """Which environments ended, and rewards: at one place, whichever graph gave them."""

    @torch.no_grad()
    def __call__(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """As mjlab's `step`; the results are overwritten by the next one."""
        env, run = self.env, self.segments.run
        if not env.cfg.auto_reset and bool(env._manual_reset_pending.any()):
            raise RuntimeError("ended environments must be reset before the next step (auto_reset=False)")
        self.segments.look()
        env.extras["log"] = {}
        self.action.copy_(action)
        self._run_between("actions", self._actions)
        for i in range(env.cfg.decimation):
            env._sim_step_counter += 1
            self.physics.step()
            if i + 1 < env.cfg.decimation:
                run("substeps", self._substep)
        env.common_step_counter += 1
        self.count.fill_(env._sim_step_counter // env.cfg.decimation)
        env.reset_buf = self._kept("reset_buf", run("terminations", self._terminations))
        env.reset_terminated, env.reset_time_outs = (
            env.termination_manager.terminated,
            env.termination_manager.time_outs,
        )
        # Asked once, for all that follows, and before the rewards: the device works on them while the host gets the
        # answer, and later on what follows while this step and the next one are sent to it.
        events, commands = self._due_events(), self._due_commands()
        if self._rows.resize(len(events) + len(commands) + 1):
            self.segments.forget()
        self._rows.ask(*events, *commands, env.reset_buf)
        env.reward_buf = self._kept("reward_buf", run("rewards", self._rewards))
        *due, ended = self._rows.answer()
        self._events(tuple(due[: len(events)]))
        self._reset(ended)
        self.physics.forward()
        self._commands(tuple(due[len(events) :]))
        self._sense()
        env.obs_buf = self._run_between("observations", self._observations)
        if len(ended) and env.cfg.auto_reset:
            env.recorder_manager.record_post_reset(ended)
        elif len(ended):
            env._manual_reset_pending[ended] = True
        env.recorder_manager.record_post_step()
        return env.obs_buf, env.reward_buf, env.reset_terminated, env.reset_time_outs, env.extras

    def about(self) -> str:
        """Which parts are captured, and why the others are not."""
        parts = [f"captured: {', '.join(self.segments.captured()) or 'nothing yet'}"]
        parts += [f"{name} eagerly ({why})" for name, why in self.segments.dropped.items()]
        if self.physics.repeats is not None:
            parts.append(f"every step of physics begins anew ({self.physics.repeats})")
        return "; ".join(parts)

    # parts of a step --------------------------------------------------------------------------------------------------

    def _actions(self) -> None:
        self.env.action_manager.process_action(self.action)
        self._controls()

    def _controls(self) -> None:
        self.env.action_manager.apply_action()
        self.env.scene.write_data_to_sim()

    def _substep(self) -> None:
        self._update()
        self._controls()

    def _update(self) -> None:
        self.env.scene.update(dt=self.env.physics_dt)
        self.env.metrics_manager.compute_substep()

    def _terminations(self) -> Tensor:
        self._update()
        self.env.episode_length_buf += 1
        return self.env.termination_manager.compute()

    def _rewards(self) -> Tensor:
        reward = self.env.reward_manager.compute(dt=self.env.step_dt)
        self.env.metrics_manager.compute()
        return reward

    def _kept(self, name: str, result: Tensor) -> Tensor:
        """The result at a place of its own."""
        if name not in self._results:
            self._results[name] = torch.empty_like(result)
        return self._results[name].copy_(result)

    def _due_events(self) -> list[Tensor]:
        """For each term whose turn comes after some time, a mask `[N]` of the environments where it comes now."""
        env, manager = self.env, self.env.event_manager
        terms = manager._mode_term_cfgs.get("interval", ())
        if any(term.is_global_time or getattr(term.func, "recompute", 0) for term in terms):
            return []
        return [left - env.step_dt < 1e-6 for left in manager._interval_term_time_left] if terms else []

    def _events(self, due: tuple[Tensor, ...]) -> None:
        """Events of every step, and those whose time has come: for each term, its rows; none if it asks by itself."""
        env, manager = self.env, self.env.event_manager
        if "step" in manager.available_modes:
            manager.apply(mode="step", dt=env.step_dt)
        if "interval" not in manager.available_modes:
            return
        apply = lambda: manager.apply(mode="interval", dt=env.step_dt)  # noqa: E731
        if due:
            self.segments.run("interval events", apply, due, asks=True)
        else:
            apply()

    def _reset(self, ended: Tensor) -> None:
        """Restart what ended. Curricula may change settings, and so run in Python every time."""
        env = self.env
        if not env.cfg.auto_reset or not len(ended):
            return
        env.recorder_manager.record_pre_reset(ended)
        env.curriculum_manager.compute(env_ids=ended)
        self._reset_physics()
        self.segments.look()
        if "resets" not in self.segments.dropped:  # one graph for each number of rows, not two
            self.segments.run("resets", self._reset_all, (ended,))
        else:
            self.segments.run("reset events", self._reset_events, (ended,))
            self.segments.run("resets of managers", self._reset_managers, (ended,))
        env.extras["log"].update(env.curriculum_manager.reset(ended))

    def _reset_physics(self) -> None:
        """As `sim.reset` with the rows that ended, whose mask there is already: to write one by rows takes longer."""
        sim, reset_data = self.env.sim, import_module("mujoco_warp").reset_data
        sim._reset_mask.copy_(self.env.reset_buf)
        self._launch(sim.reset_graph, lambda: reset_data(sim.wp_model, sim.wp_data, reset=sim._reset_mask_wp))

    def _reset_all(self) -> None:
        self._reset_events()
        self._reset_managers()

    def _reset_events(self) -> None:
        env, rows = self.env, self.segments.rows[0]
        env.scene.reset(rows)
        if "reset" in env.event_manager.available_modes:
            env.event_manager.apply(mode="reset", env_ids=rows, global_env_step_count=self.count)

    def _reset_managers(self) -> None:
        env, rows = self.env, self.segments.rows[0]
        for name in ("observation", "action", "reward", "metrics", "command", "event", "termination"):
            env.extras["log"].update(getattr(env, f"{name}_manager").reset(rows))
        env.episode_length_buf[rows] = 0
        env._manual_reset_pending[rows] = False
        env.scene.write_data_to_sim()

    def _due_commands(self) -> list[Tensor]:
        """For each term, a mask `[N]` of the environments that get a new command.

        Time goes on by a step, but not where an episode begins: there each term has just drawn how long it stays.
        """
        env, dt = self.env, self.env._command_dt
        dt.fill_(env.step_dt)
        if env.cfg.auto_reset:
            dt.masked_fill_(env.reset_buf, 0.0)
        terms = getattr(env.command_manager, "_terms", {}).values()
        if any(term.cfg.resampling_time_range[0] <= 0.0 for term in terms):  # some are over as soon as they are drawn
            return []
        return [(term.time_left - dt <= 0.0) & (dt > 0.0) for term in terms]

    def _commands(self, due: tuple[Tensor, ...]) -> None:
        compute = lambda: self.env.command_manager.compute(dt=self.env._command_dt)  # noqa: E731
        if due:
            self._run_between("commands", compute, due, asks=True)
        else:
            compute()

    def _run_between(self, name: str, part: Callable[[], Any], rows: tuple[Tensor, ...] = (), **how: Any) -> Any:
        """Run a part that comes between `forward` and the next step of physics, and see whether it writes to that."""
        segments, before = self.segments, self.physics.writes()
        output = segments.run(name, part, rows, **how)
        if segments.restored or not segments.replayed:
            self.physics.account(name, before, restored=segments.restored)
        return output

    def _sense(self) -> None:
        """Cast rays and draw cameras; what comes of it is put together with the observations."""
        sim, context = self.env.sim, self.env.sim._sensor_context
        if context is None:
            return
        self._run_between("rays", context.prepare)
        self._launch(sim.sense_graph, sim._sense_kernel)

    def _launch(self, graph: Any, eagerly: Callable[[], None]) -> None:
        """A graph of the simulation's own or, where it has none, what it would hold."""
        sim, warp = self.env.sim, import_module("warp")
        with warp.ScopedDevice(sim.wp_device):
            if sim.use_cuda_graph and graph is not None:
                warp.capture_launch(graph)
            else:
                eagerly()

    def _observations(self) -> Any:
        if self.env.sim._sensor_context is not None:
            self.env.sim._sensor_context.finalize()
        return self.env.observation_manager.compute(update_history=True)

    # what Python holds ------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Refuse a part that reads a counter: a graph would go on with the number of today."""
        cls = type(self.env)

        def counter(name: str) -> property:
            def read(env: Any) -> Any:
                raise Declined(f"it reads {name}")

            return property(read)

        self.env.__class__ = type(cls.__name__, (cls,), {name: counter(name) for name in COUNTERS})
        array = type(self.env.sim.data.qpos)
        setitem, array.__setitem__ = array.__setitem__, lambda own, index, value: own._tensor.__setitem__(index, value)
        try:
            yield
        finally:
            self.env.__class__, array.__setitem__ = cls, setitem


class Rows:
    """Indices `[K]` of the rows that hold in each of some masks `[N]`, at addresses that stay.

    The answer waits for the device, once for all masks, as far as it had got when it was asked.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.num_envs, self.device = num_envs, device
        self.masks = self.found = self.rows = torch.empty(0)
        self.asked = torch.cuda.Event() if device.type == "cuda" else None

    def resize(self, masks: int) -> bool:
        """Make room for so many masks; whether there was another number before, and so other addresses."""
        if len(self.masks) == masks:
            return False
        shape, pinned = (masks, self.num_envs), self.device.type == "cuda"
        self.masks = torch.zeros(shape, dtype=torch.bool, pin_memory=pinned)
        self.found = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self.rows = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return True

    def ask(self, *masks: Tensor) -> None:
        """Have the masks sent to the host."""
        self.masks.copy_(torch.stack(masks), non_blocking=True)
        if self.asked is not None:
            self.asked.record(torch.cuda.current_stream(self.device))

    def answer(self) -> tuple[Tensor, ...]:
        """The rows of each."""
        if self.asked is not None:
            self.asked.synchronize()
        counts = []
        for mask, found in zip(self.masks.numpy(), self.found.numpy(), strict=True):
            rows = mask.nonzero()[0]
            found[: len(rows)] = rows
            counts.append(len(rows))
        self.rows.copy_(self.found, non_blocking=True)
        return tuple(own[:count] for own, count in zip(self.rows, counts, strict=True))
