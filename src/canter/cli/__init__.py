"""The command line."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import torch
import tyro

from canter.config import TrainConfig
from canter.envs import EnvConfig
from canter.recipes import preset_for
from canter.runtime.evaluation import evaluate
from canter.runtime.trainer import Report, train
from canter.seeding import derive_seed

EVAL_EPISODES = 100


def train_command(
    env: Annotated[str, tyro.conf.Positional] = "CartPole-v1",
    /,
    *,
    seed: int = 0,
    total_steps: int | None = None,
    num_envs: int | None = None,
    device: str = "cpu",
) -> None:
    """Train a policy and print how it learns.

    Args:
        env: Environment id: Gymnasium's, envpool:ID or tensor:NAME.
        seed: Start of every random stream.
        total_steps: Transitions to train for; by default the preset's.
        num_envs: Environments stepped together; by default the preset's.
        device: Where networks and tensors live.
    """
    preset = preset_for(env)
    config = preset or TrainConfig(env=EnvConfig(id=env))
    config = replace(
        config,
        seed=seed,
        device=device,
        total_steps=config.total_steps if total_steps is None else total_steps,
        env=replace(config.env, num_envs=config.env.num_envs if num_envs is None else num_envs),
    )
    found = "its preset" if preset else "the default settings (no preset is known for it)"
    print(
        f"Training PPO on {env} with {found}: "
        f"{config.total_steps:,} steps in {config.env.num_envs} environments, seed {seed}"
    )
    algorithm = train(config, ProgressLines(config.total_steps))
    eval_env = config.env.build(device)
    result = evaluate(algorithm.policy, eval_env, EVAL_EPISODES, derive_seed(seed, "eval"))
    eval_env.close()
    print(f"Final score: mean return {result.mean:.1f} over {EVAL_EPISODES} new episodes, acting without noise")


class ProgressLines:
    """Prints one line now and then: about twenty in a run."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps, self.next_line = total_steps, 0.0

    def __call__(self, report: Report) -> None:
        """Print a line if enough has happened since the last one."""
        done = report.env_steps / self.total_steps
        if done < min(self.next_line, 1.0):
            return
        self.next_line = done + 0.05
        episodes = "no episode has ended yet"
        if report.return_ is not None:
            episodes = f"return {report.return_:8.1f}  length {report.length:6.1f}"
        metrics = report.metrics
        print(
            f"{report.env_steps:>10,} steps  {episodes}  kl {metrics['policy/kl']:.4f}  "
            f"entropy {metrics['policy/entropy']:7.3f}  explained variance {metrics['value/explained_variance']:6.2f}  "
            f"{report.env_steps / report.seconds:7,.0f} steps/s",
            flush=True,
        )


def main() -> None:
    """Entry point of the `canter` command."""
    # Networks of this size are slower with several threads than with one.
    torch.set_num_threads(1)
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"train": train_command}, prog="canter", description="Train control policies."
        )
    except (ValueError, KeyError, ImportError) as error:
        sys.exit(f"canter: {error.args[0]}")
