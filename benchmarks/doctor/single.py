"""Faults of one task each, for the rules that the faults of all tasks do not reach: the tests read their logs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from tasks import FIT_TASKS
from torch import nn

import canter
from canter import Step
from faults import FAULTS, Fault, random_action, rewards

SEED = 300
PENDULUM = {"total_steps": 10_000}
SWIMMER = {"total_steps": 100_000}
SMALL = {"total_steps": 60_000}
QUADROTOR = {"total_steps": 100_000, "env.num_envs": 64, "algorithm.horizon": 32, "algorithm.epochs": 5}
ADAPTIVE = {
    "algorithm.num_minibatches": 64,
    "algorithm.optimizer.learning_rate": {"kind": "adaptive_kl", "start": 1e-3, "every": "minibatch"},
}
GROWING = {"algorithm.entropy_coef": {"kind": "linear", "start": 0.0, "end": 1.0}, "algorithm.model.std.initial": 0.5}
INVERTED = "InvertedPendulum-v5"
RATE = "algorithm.optimizer.learning_rate"
CONSTANT = {key: x for key, x in FIT_TASKS[INVERTED].items() if not key.startswith(RATE)} | {RATE: 1e-3}
TINY = {"success.min_return": -0.02}
DIVERGING = {"tau": 1.0, "pessimism": "mean", "critic.members": 1, "optimizer.learning_rate": 0.01}


@canter.register("network", "dropout")
@dataclass(frozen=True, kw_only=True)
class DropoutConfig(canter.NetworkConfig):
    """Settings of the standard network with dropout behind it."""

    def build(self, obs: Any, role: Any) -> Any:
        """Return the network."""
        network: Any = super().build(obs, role)
        network.hidden = nn.Sequential(network.hidden, nn.Dropout(0.3))
        return network


def noise(step: Step) -> Step:
    """Return rewards that have nothing to do with what was done."""
    return replace(step, reward=torch.randn_like(step.reward))


def sac(rule: str, **settings: Any) -> tuple[str, dict[str, Any], Fault]:
    """Return a fault of SAC's settings on Pendulum."""
    return "Pendulum-sac", PENDULUM, Fault((rule,), {f"algorithm.{key}": x for key, x in settings.items()})


def amp(rule: str, **settings: Any) -> tuple[str, dict[str, Any], Fault]:
    """Return a fault of the extension's settings on the swimmer."""
    return "swimmer-narrow", SWIMMER, Fault((rule,), amp=settings)


CARTPOLE = "CartPole-v1"
SINGLE: dict[str, tuple[str, dict[str, Any], Fault]] = {
    "dropout": (CARTPOLE, SMALL, Fault(("acting_differs",), {"algorithm.model.policy.kind": "dropout"})),
    "resumed": (CARTPOLE, SMALL, Fault(("rate_jump",), resumed={"algorithm.optimizer.learning_rate": 0.3})),
    "negative bonus": ("Acrobot-v1", SMALL, Fault(("collapse",), {"algorithm.entropy_coef": -0.5})),
    "actions fail": (CARTPOLE, SMALL, Fault(("fell",), action=random_action, action_from=42_000)),
    "reward noise": (CARTPOLE, SMALL, Fault(("nothing_learned",), step=noise)),
    "adaptive rate": ("tensor:quadrotor", QUADROTOR, Fault(("noisy_rate",), ADAPTIVE)),
    "growing bonus": (INVERTED, CONSTANT, Fault(("std_runaway",), GROWING)),
    "sac reward x1e-4": ("Pendulum-sac", PENDULUM, Fault(("sac_reward_scale",), TINY, step=rewards(1e-4))),
    "sac long warm-up": sac("warm_up", warmup_steps=7_000),
    "sac few updates": sac("few_updates", horizon=16, updates_per_transition=0.0625),
    "sac diverging": sac("impossible_values", **DIVERGING),
    "sac support": sac("narrow_support", **{"critic.atoms": 51}),
    "sac high target": sac("high_temperature", **{"temperature.target_entropy": 1.0, "temperature.initial": 30.0}),
    "sac gain": sac("low_temperature", policy_gain=1000.0, **{"temperature.initial": 1e-3}),
    "amp strong": amp("discriminator_wins", input_noise=0.0, gradient_penalty=0.0, optimizer={"learning_rate": 1e-2}),
    "amp blind": amp("blind_discriminator", input_noise=30.0),
    "amp ignored": amp("style_ignored", style_weight=1e-7, task_weight=1.0),
}
"""Task or preset, its settings, and the fault."""
ALL = FAULTS | {name: fault for name, (_, _, fault) in SINGLE.items()}
