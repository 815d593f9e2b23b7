"""Compare a recurrent student of a teacher with recurrent PPO: steps to the same return.

    python benchmarks/extensions/distillation.py [--seeds 5] [--device cuda] [--task quadrotor]

Cart-pole without its velocities, and the quadrotor with a load and a charge that it does not see. One JSON file,
`results/distillation.json`; runs in it are not repeated. The teacher sees everything and is trained by PPO, once for
each seed. `steps_to_teacher` is when the mean return of 100 new episodes without noise (500 of the quadrotor, whose
charge decides most of one) first reached 95 % of the teacher's, looked at every 4,096 steps, or every 8,192 of the
quadrotor; None if never. What the teacher needed itself is not counted. PPO with memory is given five times the steps
that the student needed, if that is less than its preset has.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import canter
from canter.core.plain import to_plain
from canter.core.seeding import derive_seed
from canter.nn.rnn import RNNConfig
from canter.training.trainer import train

RESULTS = Path(__file__).parent / "results" / "distillation.json"
SHARE, TIMES = 0.95, 5


@dataclass(frozen=True)
class Task:
    """What a teacher learns, what its student and PPO with memory learn without seeing it, and how they are judged."""

    teacher: canter.TrainConfig
    student: canter.TrainConfig
    alone: canter.TrainConfig
    seen: dict[str, Any]
    """Options of the environments that students and PPO with memory are judged in."""
    look: int
    episodes: int

    def evaluate(self, policy: canter.Policy, options: dict[str, Any], seed: int, device: str) -> float:
        """Mean return of new episodes."""
        env = replace(self.teacher.env, num_envs=self.episodes, options=options).build(device)
        return canter.evaluate(policy, env, self.episodes, derive_seed(seed, "eval")).mean

    def studies(self, teacher: str) -> dict[str, canter.TrainConfig]:
        """What is compared, by name."""
        student = replace(self.student, algorithm=replace(self.student.algorithm, teacher=teacher))
        blind = replace(student.algorithm, policy=replace(student.algorithm.policy, rnn=None))
        return {
            "student, lstm": student,
            "student, no memory": replace(student, algorithm=blind),
            "ppo, lstm": self.alone,
        }


def cart_pole() -> Task:
    """Velocities are not seen."""
    env = canter.EnvConfig(id="tensor:cartpole", num_envs=32, options={"random_start": True})
    alone = canter.presets["cartpole-positions-lstm"]
    return Task(
        teacher=replace(canter.presets["CartPole"], env=env, total_steps=150_000),
        student=canter.presets["tensor:cartpole-distillation"],
        alone=replace(alone, env=replace(alone.env, options=alone.env.options | {"random_start": True})),
        seen={"positions_only": True, "privileged": True},
        look=4096,
        episodes=100,
    )


def quadrotor() -> Task:
    """Load and charge are not seen."""
    plain = replace(canter.presets["quadrotor-central-value"].algorithm, central_value=None)
    std = plain.model.std
    env = canter.EnvConfig(id="tensor:quadrotor", num_envs=256, options={"loaded": True, "random_start": True})
    told = canter.ModelConfig(policy=canter.NetworkConfig(obs_groups=("critic",)), std=std)
    memory = canter.NetworkConfig(hidden=(64, 64), rnn=RNNConfig(hidden=64), obs_groups=("policy",))
    config = canter.TrainConfig(env=env, total_steps=2_000_000)
    return Task(
        teacher=replace(config, algorithm=replace(plain, model=told)),
        student=replace(
            config,
            total_steps=400_000,
            algorithm=canter.DistillationConfig(
                policy=memory, horizon=32, optimizer=canter.OptimizerConfig(learning_rate=canter.Constant(2e-3))
            ),
        ),
        alone=replace(config, algorithm=replace(plain, model=canter.ModelConfig(policy=memory, std=std))),
        seen={"loaded": True},
        look=8192,
        episodes=500,
    )


TASKS = {"cart-pole": cart_pole(), "quadrotor": quadrotor()}


def teacher_of(task: Task, seed: int, device: str) -> tuple[canter.Policy, float]:
    """A policy that sees everything, and what it earns."""
    policy = train(replace(task.teacher, seed=seed, device=device)).policy
    options = {name: value for name, value in task.teacher.env.options.items() if name != "random_start"}
    return policy, task.evaluate(policy, options, seed, device)


def run(task: Task, config: canter.TrainConfig, goal: float, most: float = math.inf) -> dict[str, Any]:
    """One run up to its goal, or to so many steps, looked at from time to time."""
    start, looks = time.perf_counter(), []
    with canter.Trainer(config) as trainer:
        reached = None
        while not trainer.finished and reached is None and trainer.progress.counters.env_steps < most:
            steps = trainer.progress.counters.env_steps
            while not trainer.finished and trainer.progress.counters.env_steps < steps + task.look:
                trainer.learn(1)
            steps = trainer.progress.counters.env_steps
            found = task.evaluate(trainer.algorithm.policy, task.seen, config.seed, config.device)
            looks.append([steps, round(found, 1)])
            reached = steps if found >= goal else None
    return {
        "seed": config.seed,
        "steps_to_teacher": reached,
        "looks": looks,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Do the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--task", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for seed in arguments.seeds:
        for label in arguments.task:
            task, entry = TASKS[label], document.setdefault(label, {"teachers": {}, "studies": {}})
            with TemporaryDirectory() as folder:
                policy, earned = teacher_of(task, seed, arguments.device)
                canter.save_policy(f"{folder}/teacher.safetensors", policy)
                entry["teachers"][str(seed)] = earned
                for name, config in task.studies(f"{folder}/teacher.safetensors").items():
                    plain = to_plain(replace(config, algorithm=replace(config.algorithm, **_nameless(config))))
                    study = entry["studies"].setdefault(name, {"config": plain, "runs": []})
                    if seed in [done["seed"] for done in study["runs"]]:
                        continue
                    own = replace(config, seed=seed, device=arguments.device)
                    most = _allowed(entry, seed) if name == "ppo, lstm" else math.inf
                    study["runs"].append(run(task, own, SHARE * earned, most))
                    print(label, name, study["runs"][-1], flush=True)
                    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


def _allowed(entry: dict[str, Any], seed: int) -> float:
    """Steps that PPO gets beside the student of a seed."""
    (needed,) = [d["steps_to_teacher"] for d in entry["studies"]["student, lstm"]["runs"] if d["seed"] == seed]
    return math.inf if needed is None else TIMES * needed


def _nameless(config: canter.TrainConfig) -> dict[str, str]:
    return {"teacher": "teacher.safetensors"} if isinstance(config.algorithm, canter.DistillationConfig) else {}


if __name__ == "__main__":
    main()
