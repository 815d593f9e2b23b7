"""Updates per second of the large SAC beside the learner of FlashSAC's authors, on one GPU, in turns.

    python benchmarks/speed/flashsac.py PATH [--compile reduce-overhead]      a checkout of Holiday-Robot/FlashSAC

Theirs is compiled and in half precision, as its settings say, and learns from random transitions; only its updates are
timed. By default it is compiled as its authors do, which tries many forms of each product and takes long: nine minutes
were not enough on a busy machine.
In the time of ours, in single precision and in half, are the steps of its environment too. Networks and batches are the
same: policy of 128 and critics of 256 in two blocks, 101 atoms, 512 rows and 2,048. JSON goes to
`results/flashsac.json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from gymnasium.spaces import Box
from sac import updates

RESULTS = Path(__file__).parent / "results" / "flashsac.json"
ROUNDS, SECONDS, OBS, ACTIONS = 3, 4.0, 17, 4
SIZES = {"HalfCheetah-sac-large": (512, 8), "quadrotor-sac-large": (2048, 1024)}
"""Rows of a batch and environments, by preset."""
SETTINGS: dict[str, Any] = {
    **{"seed": 0, "gamma": 0.99, "n_step": 1, "device_type": "cuda", "asymmetric_observation": False},
    **{"normalize_reward": True, "normalized_G_max": 5.0, "load_optimizer": True, "load_reward_normalizer": True},
    **{"buffer_max_length": 1_000_000, "buffer_min_length": 10_000, "buffer_device_type": "cuda"},
    **{"learning_rate_init": 3e-4, "learning_rate_peak": 3e-4, "learning_rate_end": 1.5e-4},
    **{"learning_rate_warmup_rate": 1e-6, "learning_rate_warmup_step": 1},
    **{"learning_rate_decay_rate": 1.0, "learning_rate_decay_step": 1_000_000},
    **{"actor_num_blocks": 2, "actor_hidden_dim": 128, "actor_bc_alpha": 0.0, "actor_update_period": 2},
    **{"actor_noise_zeta_mu": 2.0, "actor_noise_zeta_max": 16},
    **{"critic_num_blocks": 2, "critic_hidden_dim": 256, "critic_num_bins": 101, "critic_target_update_tau": 0.01},
    **{"critic_min_v": -5.0, "critic_max_v": 5.0},
    **{"temp_initial_value": 0.01, "temp_target_sigma": 0.15, "temp_target_entropy": 0.0},
    **{"use_compile": True, "use_amp": True},
}
"""As in its configs/agent/flashSAC.yaml."""


def their_agent(batch: int, num_envs: int, how: str) -> Any:
    """Their agent with enough random transitions to learn from, compiled."""
    module = importlib.import_module("flash_rl.agents.flashSAC.agent")
    obs, action = (Box(-1, 1, (num_envs, width), np.float32) for width in (OBS, ACTIONS))
    settings = SETTINGS | {"sample_batch_size": batch, "compile_mode": how}
    agent = module.FlashSACAgent(obs, action, {}, module.FlashSACConfig(**settings))
    draw = np.random.default_rng(0)
    while not agent.can_start_training():
        rows = {name: draw.standard_normal((num_envs, OBS), np.float32) for name in ("observation", "next_observation")}
        flags = {name: np.zeros(num_envs, np.float32) for name in ("terminated", "truncated")}
        actions = draw.uniform(-1, 1, (num_envs, ACTIONS)).astype(np.float32)
        agent.process_transition(rows | flags | {"action": actions, "reward": rows["observation"][:, 0]})
    for _ in range(100):
        agent.update()
    return agent


def rate(agent: Any) -> float:
    """Updates per second of theirs."""
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        for _ in range(20):
            agent.update()
        count += 20
    torch.cuda.synchronize()
    return round(count / (time.perf_counter() - start), 1)


def main() -> None:
    """Both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--compile", default="auto", help="how theirs is compiled")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.path.insert(0, options.checkout)
    for name in ("jax", "jax.numpy", "omegaconf"):  # named by its types and its command line, not by the learner
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = MagicMock()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["compiled"] = options.compile
    for preset, (batch, num_envs) in SIZES.items():
        agent = their_agent(batch, num_envs, options.compile)
        measured: dict[str, list[float]] = {"canter": [], "canter, bfloat16": [], "flashsac": []}
        for _ in range(ROUNDS):
            measured["canter"].append(updates(preset, SECONDS)["updates per second"])
            measured["canter, bfloat16"].append(updates(preset, SECONDS, "bfloat16")["updates per second"])
            measured["flashsac"].append(rate(agent))
            print(preset, {name: rates[-1] for name, rates in measured.items()}, flush=True)
        middle = {name: statistics.median(rates) for name, rates in measured.items()}
        ratios = {name: round(rate / middle["flashsac"], 2) for name, rate in middle.items() if name != "flashsac"}
        found[preset] = {"batch": batch, "updates per second": measured, "ratio of medians": ratios}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
