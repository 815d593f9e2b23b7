"""Observers of training, as in rl_games."""

from __future__ import annotations

from typing import Any


class AlgoObserver:
    """Called at the stations of training; subclasses of the parent's class will do too."""

    def before_init(self, base_name: str, config: dict[str, Any], experiment_name: str) -> None:
        """Before the agent is made."""

    def after_init(self, algo: Any) -> None:
        """When it is made; `algo` has writer, config, frame, epoch_num, mean_rewards and the like."""

    def process_infos(self, infos: Any, done_indices: Any) -> None:
        """After every step. Only called where a subclass has it, as it waits for the device."""

    def after_steps(self) -> None:
        """After every rollout and its update."""

    def after_clear_stats(self) -> None:
        """Never called here: statistics are a window over the last 100 episodes."""

    def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
        """After every row of the log."""


class DefaultAlgoObserver(AlgoObserver):
    """What Runner takes where none is given."""


class IsaacAlgoObserver(AlgoObserver):
    """Writes what the simulator reports as `infos["episode"]`, averaged over a rollout on the device."""

    def after_init(self, algo: Any) -> None:
        """Whose numbers to write, and where."""
        self.algo, self.writer = algo, algo.writer

    def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
        """One row under the parent's tags."""
        for name, value in self.algo.episode_infos.items():
            self.writer.add_scalar(f"Episode/{name}", value, epoch_num)


def looks_at_infos(observer: Any) -> bool:
    """Whether an observer has a `process_infos` that does something."""
    known = ("AlgoObserver", "DefaultAlgoObserver")
    owner = next((cls for cls in type(observer).__mro__ if "process_infos" in vars(cls)), None)
    return owner is not None and owner.__name__ not in known
