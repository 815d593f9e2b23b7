"""Compute RSL-RL's RND and symmetry on a small batch.

`tests/algorithms/extensions/test_rsl_rl_numbers.py` compares Canter with them.

    python benchmarks/extensions/rsl_rl_numbers.py          in an environment with rsl-rl-lib 5.5.1

Writes `tests/algorithms/extensions/rsl_rl_5_5_1.json`: weights, batch and results, in float64.
Canter is not needed here.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rsl_rl.extensions.rnd import RandomNetworkDistillation
from rsl_rl.extensions.symmetry import Symmetry
from tensordict import TensorDict

OUT = Path(__file__).parents[2] / "tests" / "algorithms" / "extensions" / "rsl_rl_5_5_1.json"
STEPS, ENVS, WIDTH, ACTIONS = 6, 4, 5, 3
SIGNS, ACTION_SIGNS = (1, -1, 1, -1, -1), (-1, 1, -1)


def plain(tensor: torch.Tensor) -> Any:
    return tensor.detach().tolist()


def curiosity(obs: torch.Tensor, *, normalize: bool) -> dict[str, Any]:
    """Bonuses of a rollout step by step, and the loss of the predictor on all rows."""
    groups = {"rnd_state": ["policy"]}
    rnd = RandomNetworkDistillation(WIDTH, groups, 3, (8,), (8,), "elu", reward_normalization=normalize, weight=0.7)
    bonus = [rnd.get_intrinsic_reward(TensorDict({"policy": row}, batch_size=[ENVS])) for row in obs]
    rows = TensorDict({"policy": obs.flatten(0, 1)}, batch_size=[STEPS * ENVS])
    return {
        "target": [plain(weight) for weight in rnd.target.parameters()],
        "predictor": [plain(weight) for weight in rnd.predictor.parameters()],
        "bonus": plain(torch.stack(bonus)),
        "loss": rnd.compute_loss(rows).item(),
    }


def mirror(env: Any, obs: TensorDict | None, actions: torch.Tensor | None) -> tuple[Any, Any]:
    if obs is not None:
        both = torch.cat([obs["policy"], obs["policy"] * torch.tensor(SIGNS)])
        obs = TensorDict({"policy": both}, batch_size=[len(both)])
    return obs, None if actions is None else torch.cat([actions, actions * torch.tensor(ACTION_SIGNS)])


def symmetry(obs: torch.Tensor) -> dict[str, Any]:
    """What augmentation makes of a batch, and the mirror loss of a linear policy."""
    actor = torch.nn.Linear(WIDTH, ACTIONS)
    rows = obs.flatten(0, 1)
    count = len(rows)
    batch = SimpleNamespace(
        observations=TensorDict({"policy": rows}, batch_size=[count]),
        actions=torch.randn(count, ACTIONS),
        old_actions_log_prob=torch.randn(count, 1),
        values=torch.randn(count, 1),
        advantages=torch.randn(count, 1),
        returns=torch.randn(count, 1),
    )
    names = ("actions", "old_actions_log_prob", "values", "advantages", "returns")
    given = {name: plain(getattr(batch, name)) for name in names}
    both = Symmetry(None, mirror, use_data_augmentation=True, use_mirror_loss=True, mirror_loss_coeff=0.5)
    both.augment_batch(batch, count)
    loss = both.compute_loss(lambda observations: actor(observations["policy"]), batch, count)
    return {
        "signs": SIGNS,
        "action_signs": ACTION_SIGNS,
        "actor": [plain(weight) for weight in actor.parameters()],
        "given": given,
        "augmented": {name: plain(getattr(batch, name)) for name in names}
        | {"observations": plain(batch.observations["policy"])},
        "mirror_loss": loss.item(),
    }


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    obs = torch.randn(STEPS, ENVS, WIDTH)
    document = {
        "rsl_rl": version("rsl-rl-lib"),
        "obs": plain(obs),
        "rnd": curiosity(obs, normalize=False),
        "rnd_normalized": curiosity(obs, normalize=True),
        "symmetry": symmetry(obs),
    }
    OUT.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
