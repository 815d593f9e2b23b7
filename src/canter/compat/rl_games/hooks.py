"""Hooks of scripts into rl_games' agents: observers, and overrides, which are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from canter.core.plain import ConfigError


class AlgoObserver:
    """Callbacks of training; subclasses of rl_games' own class work too."""

    def before_init(self, base_name: str, config: dict[str, Any], experiment_name: str) -> None:
        """Called before the agent is built."""

    def after_init(self, algo: Any) -> None:
        """Called after the agent is built.

        `algo` has writer, config, frame, epoch_num, mean_rewards and the like.
        """

    def process_infos(self, infos: Any, done_indices: Any) -> None:
        """Called after every step, only if a subclass overrides it, as it waits for the device."""

    def after_steps(self) -> None:
        """Called after every rollout and its update."""

    def after_clear_stats(self) -> None:
        """Called once before training; statistics cover the last 100 episodes and are never cleared."""

    def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
        """Called after every row of the log."""


class DefaultAlgoObserver(AlgoObserver):
    """The default observer of Runner."""


class IsaacAlgoObserver(AlgoObserver):
    """Writes the simulator's `infos["episode"]`, averaged over a rollout on the device."""

    def after_init(self, algo: Any) -> None:
        """Keep the agent and its writer."""
        self.algo, self.writer = algo, algo.writer

    def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
        """Write one row under rl_games' tags."""
        for name, value in self.algo.episode_infos.items():
            self.writer.add_scalar(f"Episode/{name}", value, epoch_num)


def looks_at_infos(observer: Any) -> bool:
    """Return True for an observer that overrides `process_infos`."""
    known = ("AlgoObserver", "DefaultAlgoObserver")
    owner = next((cls for cls in type(observer).__mro__ if "process_infos" in vars(cls)), None)
    return owner is not None and owner.__name__ not in known


HOOKS = {
    "train_epoch": "canter.Extension.phases(), or an algorithm of your own (canter.register('algorithm', NAME))",
    "play_steps": "an environment wrapper, or canter.Extension.reward(rollout)",
    "play_steps_rnn": "an environment wrapper, or canter.Extension.reward(rollout)",
    "prepare_dataset": "canter.Extension.augment(batch) or reward(rollout)",
    "calc_gradients": "canter.Extension.loss(batch, output)",
    "train_actor_critic": "canter.Extension.loss(batch, output)",
    "update_lr": "a schedule of your own (canter.register('schedule', NAME))",
    "_eval_disc": "the extension amp: leave the registration of amp_continuous out, which is known here",
    "write_stats": "AlgoObserver.after_print_stats",
    "print_stats": "AlgoObserver.after_print_stats",
}
"""Methods that subclasses of rl_games' agents override, and the extension point here."""


class IsaacGymAmp(Exception):
    """A builder made IsaacGymEnvs' own AMP agent, whose work the agent `amp_continuous` does here."""


def refuse_overrides(cls: type, own: type | None = None) -> None:
    """Raise ConfigError for a class that overrides internals of rl_games' agents, with the extension point of each.

    Raise IsaacGymAmp for the one of which there is an agent here.
    """
    if (cls.__module__, cls.__name__) == ("isaacgymenvs.learning.amp_continuous", "AMPAgent"):
        raise IsaacGymAmp
    bases = [base for base in cls.__mro__ if base is not own]
    users = [base for base in bases if not base.__module__.startswith("rl_games.")]
    changed = [name for name in HOOKS if any(name in vars(base) for base in users)]
    if changed:
        advice = "; ".join(f"{name}: {HOOKS[name]}" for name in changed)
        raise ConfigError(f"{cls.__name__} changes the inside of rl_games' agent, which is not there. Use {advice}")
    if len(users) < len(bases):
        why = "is an agent of rl_games itself, or adds nothing to it: leave its registration with algo_factory out"
        raise ConfigError(f"{cls.__name__} {why}")


@contextmanager
def refuse_rl_games_agents() -> Iterator[None]:
    """Refuse rl_games' own agents and their subclasses while a builder runs."""
    places = {"common.a2c_common": "A2CBase", "algos_torch.sac_agent": "SACAgent"}
    found: Any = [getattr(sys.modules.get(f"rl_games.{module}"), name, None) for module, name in places.items()]
    theirs = [(cls, cls.__init__) for cls in found if cls is not None]
    try:
        for cls, _ in theirs:
            cls.__init__ = lambda self, *_, **__: refuse_overrides(type(self))
        yield
    finally:
        for cls, init in theirs:
            cls.__init__ = init
