"""What settings of RSL-RL and of rl_games cost beside Canter's own form of the same size, in turns, in one process.

    python benchmarks/speed/imported.py --device cuda

RSL-RL's default for legged robots (deviation as a plain number, ELU [512, 256, 128]) and rl_games' (policy and values
on one trunk, bounds loss, values normalised), each imported by default and with `parity`. JSON goes to
`results/imported.json`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from iteration import measure, settings

import canter
from canter.compat import import_config
from canter.training.execution import ExecutionConfig

RESULTS = Path(__file__).parent / "results" / "imported.json"

RSL_RL: dict[str, Any] = {
    "num_steps_per_env": 24,
    "max_iterations": 1500,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "actor": {
        "class_name": "MLPModel",
        "hidden_dims": [512, 256, 128],
        "activation": "elu",
        "obs_normalization": True,
        "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"},
    },
    "critic": {
        "class_name": "MLPModel",
        "hidden_dims": [512, 256, 128],
        "activation": "elu",
        "obs_normalization": True,
    },
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "gamma": 0.99,
        "lam": 0.95,
        "entropy_coef": 0.01,
        "desired_kl": 0.01,
        "max_grad_norm": 1.0,
        "value_loss_coef": 1.0,
        "use_clipped_value_loss": True,
        "clip_param": 0.2,
    },
}

RL_GAMES: dict[str, Any] = {
    "params": {
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": {
            "name": "actor_critic",
            "separate": False,
            "space": {
                "continuous": {
                    "mu_activation": "None",
                    "sigma_activation": "None",
                    "mu_init": {"name": "default"},
                    "sigma_init": {"name": "const_initializer", "val": 0},
                    "fixed_sigma": True,
                }
            },
            "mlp": {"units": [256, 128, 64], "activation": "elu", "initializer": {"name": "default"}},
        },
        "config": {
            "name": "Ant",
            "env_name": "rlgpu",
            "ppo": True,
            "mixed_precision": False,
            "normalize_input": True,
            "normalize_value": True,
            "value_bootstrap": True,
            "num_actors": 4096,
            "reward_shaper": {"scale_value": 0.01},
            "normalize_advantage": True,
            "gamma": 0.99,
            "tau": 0.95,
            "learning_rate": 3e-4,
            "lr_schedule": "adaptive",
            "schedule_type": "legacy",
            "kl_threshold": 0.008,
            "max_epochs": 500,
            "grad_norm": 1.0,
            "entropy_coef": 0.0,
            "truncate_grads": True,
            "e_clip": 0.2,
            "horizon_length": 24,
            "mini_epochs": 5,
            "critic_coef": 2,
            "clip_value": True,
            "seq_length": 24,
            "bounds_loss_coef": 0.0001,
        },
    }
}


def forms(num_envs: int) -> dict[str, canter.TrainConfig]:
    """What is measured, by name: each parent's settings beside a native form with networks of the same widths."""
    RL_GAMES["params"]["config"]["minibatch_size"] = 24 * num_envs // 4
    found = {}
    for name, source, hidden in (("RSL-RL", RSL_RL, (512, 256, 128)), ("rl_games", RL_GAMES, (256, 128, 64))):
        own = settings(num_envs=num_envs, hidden=hidden)
        found[f"{name}, native form"] = own
        for parity in (False, True):
            config = import_config(source, env="tensor:null", num_envs=num_envs, parity=parity).config
            found[f"{name}, {'parity' if parity else 'imported'}"] = replace(config, env=own.env)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    execution = ExecutionConfig(mode="graph" if options.device == "cuda" else "eager")
    milliseconds: dict[str, list[float]] = {}
    engines: dict[str, str] = {}
    for _ in range(options.rounds):
        for name, config in forms(options.num_envs).items():
            result = measure(config, options.device, execution, options.repeats)
            milliseconds.setdefault(name, []).append(result["iteration_ms"])
            env = config.env.build(options.device)
            engines[name] = config.algorithm.build(env.spec, seed=0).engine.name
    ratios = {
        name: round(min(times) / min(milliseconds[f"{name.partition(',')[0]}, native form"]), 3)
        for name, times in milliseconds.items()
    }
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    document = {"machine": machine, "iteration_ms": milliseconds, "ratio": ratios, "engine": engines}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
