"""Whether a student with memory comes to its teacher in fewer steps than PPO with memory needs by itself.

    python benchmarks/extensions/distillation.py [--seeds 5] [--device cuda]

Cart-pole without its velocities. One JSON file, `results/distillation.json`; runs in it are not repeated. The teacher
sees velocities and is trained by PPO, once for each seed. `steps_to_teacher` is when the mean return of 100 new
episodes without noise first reached 95 % of the teacher's, looked at every 4,096 steps; None if never. What the teacher
needed itself is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import canter
from canter.envs.tensor import CartPole
from canter.plain import to_plain
from canter.recipes.classic import cartpole
from canter.recipes.memory import cartpole_distillation, cartpole_positions
from canter.seeding import derive_seed

RESULTS = Path(__file__).parent / "results" / "distillation.json"
LOOK, SHARE = 4096, 0.95
SEEN = {"positions_only": True, "privileged": True}


def teacher_of(seed: int, device: str) -> tuple[canter.Policy, float]:
    """A policy that sees velocities, and what it earns."""
    env = canter.EnvConfig(id="tensor:cartpole", num_envs=32, options={"random_start": True})
    config = replace(cartpole(), env=env, total_steps=150_000, seed=seed, device=device)
    policy = canter.train(config).policy
    return policy, canter.evaluate(policy, CartPole(100, device), 100, derive_seed(seed, "eval")).mean


def run(config: canter.TrainConfig, goal: float) -> dict[str, Any]:
    """One run up to its goal, looked at from time to time."""
    env, start, looks = CartPole(100, config.device, **SEEN), time.perf_counter(), []
    with canter.Trainer(config) as trainer:
        reached = None
        while not trainer.finished and reached is None:
            steps = trainer.run.counters.env_steps
            while not trainer.finished and trainer.run.counters.env_steps < steps + LOOK:
                trainer.learn(1)
            steps = trainer.run.counters.env_steps
            found = canter.evaluate(trainer.algorithm.policy, env, 100, derive_seed(config.seed, "eval")).mean
            looks.append([steps, round(found, 1)])
            reached = steps if found >= goal else None
    return {
        "seed": config.seed,
        "steps_to_teacher": reached,
        "looks": looks,
        "seconds": round(time.perf_counter() - start, 1),
    }


def studies(teacher: str) -> dict[str, canter.TrainConfig]:
    """What is compared, by name."""
    config = cartpole_distillation()
    student = replace(config, algorithm=replace(config.algorithm, teacher=teacher))
    blind = replace(student.algorithm, policy=replace(student.algorithm.policy, memory=None))
    alone = cartpole_positions("lstm")
    return {
        "student, lstm": student,
        "student, no memory": replace(student, algorithm=blind),
        "ppo, lstm": replace(alone, env=replace(alone.env, options=alone.env.options | {"random_start": True})),
    }


def main() -> None:
    """Do the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"teachers": {}, "studies": {}}
    for seed in range(arguments.seeds):
        with TemporaryDirectory() as folder:
            policy, earned = teacher_of(seed, arguments.device)
            canter.save_policy(f"{folder}/teacher.safetensors", policy)
            document["teachers"][str(seed)] = earned
            for name, config in studies(f"{folder}/teacher.safetensors").items():
                plain = to_plain(replace(config, algorithm=replace(config.algorithm, **_nameless(config))))
                entry = document["studies"].setdefault(name, {"config": plain, "runs": []})
                if seed in [done["seed"] for done in entry["runs"]]:
                    continue
                entry["runs"].append(run(replace(config, seed=seed, device=arguments.device), SHARE * earned))
                print(name, entry["runs"][-1], flush=True)
                RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def _nameless(config: canter.TrainConfig) -> dict[str, str]:
    return {"teacher": "teacher.safetensors"} if isinstance(config.algorithm, canter.DistillationConfig) else {}


if __name__ == "__main__":
    main()
