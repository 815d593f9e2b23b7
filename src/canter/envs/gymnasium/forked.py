"""Groups of environments stepped in forked processes. N environments.

Threads would wait for each other's Python, a third of a step of Gymnasium's MuJoCo.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate

from canter.core.specs import EnvFailed
from canter.envs.failures import EnvCalls, SharedEnvCalls, Watchdog
from canter.envs.gymnasium import state as exact
from canter.envs.gymnasium.fork import Fork, shared
from canter.envs.gymnasium.infos import InfoMeans
from canter.envs.gymnasium.state import StateUnavailable, map_parts, obstacle
from canter.envs.gymnasium.sync import SyncStepper, runs_foreign_code
from canter.envs.gymnasium.vector import CLOSE_TIMEOUT, STEP_TIMEOUT, EnvInfos

logger = logging.getLogger(__name__)

NO_SEED = -1
"""In `ForkedStepper.seeds`: the random stream continues."""


class ForkedStepper(SyncStepper):
    """Steps groups of environments of a `SyncVectorEnv` in `same_step` mode in forked processes.

    Gymnasium's own environments step the first group in this process, which saves waking another.
    Foreign code is `isolated`: once made, environments are reset, stepped and closed in forks only.
    A fork that takes longer than `step_timeout` seconds for a call is killed, which is an
    `EnvFailed` with the number of the environment; so is one that dies. A fork that does not close
    its environments within `close_timeout` seconds is killed.
    """

    def __init__(
        self,
        env: SyncVectorEnv,
        groups: int = 1,
        *,
        step_timeout: float = STEP_TIMEOUT,
        close_timeout: float = CLOSE_TIMEOUT,
        log_info: bool = False,
    ) -> None:
        super().__init__(env, groups, log_info=log_info)
        self.isolated = runs_foreign_code(env) and self.marks_ends
        self.own_groups = [] if self.isolated else self.groups[:1]
        """Groups that are stepped in this process: the first or none."""
        self.forks: list[Fork] = []
        space = env.single_action_space
        self.actions = np.zeros((env.num_envs, *(space.shape or ())), space.dtype)
        """The actions of a step, in memory that forked processes read."""
        self.seeds = np.zeros(env.num_envs, np.int64)
        """The seeds of a reset, in memory that forked processes read."""
        self.close_timeout = close_timeout
        self._awaited: Fork | None = None
        """The fork whose answer is being waited for."""
        self._watchdog = Watchdog(step_timeout, self._kill_awaited)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit, in environments made with the same options."""
        self.forget()
        super().load_state_dict(state)

    def close(self) -> None:
        """Close the environments and end the processes."""
        copies = self.isolated and bool(self.forks)
        if copies:
            self.env.closed = not self._close_in_forks()
        self._watchdog.close()
        self.forget()
        with suppress(Exception) if copies else nullcontext():  # foreign code was closed where it was stepped
            super().close()

    def seen_info(self) -> set[str]:
        """Return the names of entries of info that all processes have seen so far."""
        self._ask("names")
        return self.info_names.union(*[self._result(fork) for fork in self.forks])

    def take_infos(self, means: InfoMeans) -> None:
        """Move the totals of all groups to `means`, those in other processes too."""
        super().take_infos(means)
        if self.infos:
            with suppress(EnvFailed):  # the next step reports a process that died
                self._ask("infos")
                for fork in self.forks:
                    means.merge(self._result(fork) or {})

    def gather(self) -> None:
        """Bring all environments back into this process, as they are; the next step forks again."""
        if self.forks:
            reason = obstacle(self.env)
            if reason is not None:
                raise StateUnavailable(
                    f"environments in forked processes cannot be brought back: {reason}; pass a seed to reset(), or "
                    "use vectorization=sync"
                )
            exact.restore_singles(self.env, self._fork_states())
            self.forget()

    def forget(self) -> None:
        """End forked processes, whose environments will be reset or restored here."""
        for fork in self.forks:
            fork.end()
        self.forks = []

    def _step_groups(self, actions: np.ndarray) -> EnvInfos:
        if len(self.own_groups) == len(self.groups):
            return super()._step_groups(actions)
        if not self.forks or self.actions.dtype != actions.dtype:
            if not self.isolated:
                self.gather()
                self.actions = actions
            self._fork()
        self.actions[...] = actions
        self._ask("step")
        env_infos: EnvInfos = []
        for group in self.own_groups:
            env_infos += self._step_group(group, actions)
        for fork in self.forks:
            env_infos += self._result(fork)
        return env_infos

    def _copy_state(self) -> dict[str, Any]:
        return exact.snapshot(self.env, self._fork_states())

    def _fork_states(self) -> dict[int, dict[str, Any]]:
        """Return the states in forked processes by number; those of this process are outdated."""
        self._ask("snapshot")
        return {number: state for fork in self.forks for number, state in self._result(fork).items()}

    def _ask(self, call: str) -> None:
        """Start a call in all forks."""
        for fork in self.forks:
            if fork.busy:  # the answer of an interrupted call
                with suppress(EnvFailed):
                    self._result(fork)
            fork.ask(call)

    def _result(self, fork: Fork) -> Any:
        """Return the result of a fork's call; kill the fork if it takes too long."""
        self._awaited = fork
        self._watchdog.begin()
        try:
            return fork.result()
        finally:
            self._watchdog.end()

    def _kill_awaited(self, seconds: float) -> None:
        """Kill the fork that is late; waiting then ends as if it had died."""
        if self._awaited is not None:
            limit = f"{self._watchdog.seconds:g} s (env.step_timeout)"
            self._awaited.kill(f"{self._awaited.call}() took more than {limit}, so its process was ended")

    def _fork(self) -> None:
        """Fork a process for each group but those of this process, from the environments as they are."""
        env = self.env
        self.actions = shared(self.actions)
        self.seeds = shared(self.seeds)
        env._rewards = shared(env._rewards)
        env._terminations = shared(env._terminations)
        env._truncations = shared(env._truncations)
        env._observations = map_parts(shared, env._observations)
        if not isinstance(env._observations, np.ndarray):
            self.parts = [self._row(number) for number in range(env.num_envs)]
        self.forks = [Fork(*self._fork_calls(group)) for group in self.groups[len(self.own_groups) :]]

    def _fork_calls(self, group: list[int]) -> tuple[dict[str, Callable[[], Any]], SharedEnvCalls]:
        """Return the calls that a fork answers, and where it notes which environment it calls."""
        calls = self.calls[group[0]] = SharedEnvCalls()
        answers: dict[str, Callable[[], Any]] = {
            "step": partial(self._step_group, group, self.actions),
            "snapshot": lambda: {number: exact.snapshot_single(self.env.envs[number]) for number in group},
            "names": lambda: sorted(self.info_names),
            "reset": partial(self._reset_in_fork, group, calls),
            "close": partial(self._close_group, group, calls),
        }
        if self.infos:
            answers["infos"] = self.infos[group[0]].take
        return answers, calls

    def _reset_envs(self, seeds: list[int] | None, mask: np.ndarray | None) -> EnvInfos:
        if self.isolated:
            if any(fork.cause_of_death for fork in self.forks):
                self.forget()
            if not self.forks:
                self._fork()
            self.seeds[:] = NO_SEED if seeds is None else seeds
            self._ask("reset")
            return [item for fork in self.forks for item in self._result(fork)]
        if seeds is None:
            self.gather()
        else:
            self.forget()
        return super()._reset_envs(seeds, mask)

    def _reset_in_fork(self, group: list[int], calls: EnvCalls) -> EnvInfos:
        """Reset the environments of a group, write their observations and return infos by number."""
        env = self.env
        seeds = None if self.seeds[0] == NO_SEED else self.seeds.tolist()
        env_infos = self._reset_group(group, seeds, None, calls)
        for number in group:
            concatenate(env.single_observation_space, [env._env_obs[number]], self._row(number))
        return env_infos

    def _row(self, number: int) -> Any:
        """Return the place of an environment's observation among those of all."""
        return map_parts(lambda rows: rows[number : number + 1], self.env._observations)

    def _close_group(self, group: list[int], calls: EnvCalls) -> None:
        """Close the environments of a group."""
        with calls:
            for number in group:
                calls.number = number
                self.env.envs[number].close()

    def _close_in_forks(self) -> bool:
        """Close the environments in the forks and kill late ones; return True if all were closed."""
        running = [fork for fork in self.forks if not fork.cause_of_death]
        # If one hung, others may hang too: the run has waited long enough.
        patience = self.close_timeout if len(running) == len(self.forks) else min(self.close_timeout, 1.0)
        until = time.monotonic() + patience
        for fork in running:  # an interrupted call may be under way
            self._finish(fork, until)
            with suppress(EnvFailed):
                fork.ask("close")
        failures = [failure for fork in running if (failure := self._finish(fork, until)) is not None]
        for failure in failures:
            logger.warning("environment %s: %s; no data was lost", failure.row, failure)
        return not failures and not any(fork.cause_of_death for fork in self.forks)

    def _finish(self, fork: Fork, until: float) -> EnvFailed | None:
        """Wait for the end of a fork's call, or kill it at the time `until`; return its error."""
        if fork.busy and not fork.answers.poll(max(0.0, until - time.monotonic())):
            fork.kill(f"{fork.call}() took more than {self.close_timeout:g} s (env.close_timeout), so it was ended")
        try:
            if fork.busy:
                fork.result()
        except EnvFailed as error:
            return error
        return None
