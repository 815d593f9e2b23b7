"""`canter tune` beside Optuna with Stable-Baselines3, as rl-zoo searches: same trials, budget, ranges and cores.

    python benchmarks/tuning/search.py [--tasks CartPole-v1] [--trials 40] [--steps 50000] [--cores 0,1:2,3]
        [--folder FOLDER]

Both search the learning rate in [1e-5, 1e-1], the discount, the clip range and the entropy coefficient around
published settings: Canter's preset, and rl-zoo's tuned settings (commit 00128b5). Both have two cores and run two
trials at a time; with `--cores` each has cores of its own and both run at once, otherwise one after the other.

The other side is rl-zoo's pattern: TPE with ten random trials, the median pruner after a third of the evaluations
(rl-zoo's own number of evaluations would be one here, and prune nothing; it has five), five episodes each, a journal
that two processes share. `search` is the wall time until the winner is known: `canter tune` as a whole, with the
fresh seeds that rl-zoo does not have. Then both winners, and the preset, train on ten seeds that no search has seen,
for the same steps, and play 100 episodes each. JSON goes to `results/search.json`, as results come.

With `--folder`, what ran there is kept: if this is killed, the same command continues. The seconds of a part are
those of all its sessions; processor seconds are those of its last one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "search.json"
TASKS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1")
RATE = "algorithm.optimizer.learning_rate"
SPACE = {
    RATE: "1e-5..1e-1:log",
    "algorithm.gamma": "0.9..0.9999:log1m",
    "algorithm.clip_ratio": "0.1..0.4",
    "algorithm.entropy_coef": "1e-8..0.1:log",
}
ZOO: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "n_epochs": 20},
    "Pendulum-v1": {"n_envs": 4, "n_steps": 1024, "n_epochs": 10, "use_sde": True, "sde_sample_freq": 4},
    "Acrobot-v1": {"n_envs": 16, "n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4, "normalize": True},
}
"""rl-zoo's settings, without those that are searched."""
UNSEEN = range(5000, 5010)
EVALUATIONS, EPISODES, LAST_EPISODES = 5, 5, 100


def main() -> None:
    """Search on all tasks on both sides, at once or one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--cores", help="cores of Canter and of the other side, such as 0,1:2,3")
    parser.add_argument("--folder", type=Path, help="folder in which a killed comparison continues")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing new is started")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=str, help="(internal) the order of a process, as JSON")
    options = parser.parse_args()
    if options.work:
        work(json.loads(options.work))
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    until = time.monotonic() + options.limit
    document: dict[str, Any] = {"trials": options.trials, "steps": options.steps, "space": SPACE, "tasks": {}}
    if options.folder is not None and options.out.is_file():
        document |= json.loads(options.out.read_text())
    for task in options.tasks:
        document["tasks"].setdefault(task, {})
    sides = {"canter": canter_side, "sb3": sb3_side}
    cores = {"canter": None, "sb3": None}
    if options.cores:
        cores = dict(zip(sides, options.cores.split(":"), strict=True))

    lock = threading.Lock()
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def note(task: str, **facts: Any) -> None:
        with lock:
            document["tasks"][task] |= facts
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    def run(side: str) -> None:
        for task in options.tasks:
            if time.monotonic() < until:
                with tempfile.TemporaryDirectory() as temporary:
                    folder = Path(temporary) if options.folder is None else options.folder.absolute() / task / side
                    folder.mkdir(parents=True, exist_ok=True)
                    known = document["tasks"][task]
                    place = Place(folder, cores[side], side, functools.partial(note, task), known)
                    sides[side](place, task, options.trials, options.steps)
                    print(task, json.dumps(known), flush=True)

    threads = [threading.Thread(target=run, args=(side,)) for side in sides]
    for thread in threads:
        thread.start()
        if not options.cores:
            thread.join()
    for thread in threads:
        thread.join()


class Place:
    """A folder and the cores of one side, the results that are known, and who takes further ones."""

    def __init__(
        self, folder: Path, cores: str | None, side: str, take: Callable[..., None], known: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.prefix = ["taskset", "-c", cores] if cores else []
        self.side = side
        self.take = take
        self.known = known

    def lacks(self, name: str) -> bool:
        """Return whether a result is not known as a whole."""
        return not self.known.get(f"{self.side}_{name}", {"done": False}).get("done", True)

    def run(self, name: str, *commands: list[str]) -> None:
        """Run commands side by side and note wall and processor seconds. Raises with the output if one fails."""
        earlier = self.known.get(f"{self.side}_{name}", {}).get("seconds", 0.0)
        before = time.perf_counter() - earlier
        started = []
        for number, command in enumerate(commands):
            log = (self.folder / f"output{number}.txt").open("w")
            started.append(subprocess.Popen([*self.prefix, *command], cwd=self.folder, stdout=log, stderr=log))
        while any(not exited(process.pid) for process in started):
            self.note(**{name: {"seconds": time.perf_counter() - before, "done": False}})
            time.sleep(1.0)
        used = 0.0
        for number, process in enumerate(started):
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            used += usage.ru_utime + usage.ru_stime
            if process.returncode:
                raise RuntimeError((self.folder / f"output{number}.txt").read_text()[-2000:])
        self.note(**{name: {"seconds": time.perf_counter() - before, "processor_seconds": used}})

    def note(self, **facts: Any) -> None:
        """Hand over results."""
        self.take(**{f"{self.side}_{name}": fact for name, fact in facts.items()})


def canter_side(place: Place, task: str, trials: int, steps: int) -> None:
    """Search with `canter tune`, then train winner and preset on the unseen seeds."""
    canter = [sys.executable, "-m", "canter"]
    ranges = [text for key, spec in SPACE.items() for text in (f"--space.{key}", spec)]
    plan = ["--trials", str(trials), "--total-steps", str(steps), "--jobs", "2", "--name", "search"]
    if place.lacks("search"):
        begun = (place.folder / "runs" / "search" / "tune.json").is_file()
        what = ["runs/search", "--jobs", "2"] if begun else [task, *plan, *ranges]
        place.run("search", [*canter, "tune", *what])
        place.note(summary=(place.folder / "output0.txt").read_text().splitlines()[-8:])
    head = (place.folder / "runs" / "search" / "best.yaml").read_text().partition("\n")[0]
    place.note(winner=head)
    seeds = f"{UNSEEN.start}..{UNSEEN.stop - 1}"
    for name, flags in {"winner": ["--config", "runs/search/best.yaml"], "preset": []}.items():
        if not place.lacks(f"{name}_unseen"):
            continue
        begun = (place.folder / "runs" / name / "sweep.json").is_file()
        what = [task, *flags, "--total-steps", str(steps), "--seed", seeds, "--name", name]
        place.run(f"{name}_training", [*canter, "sweep", *([f"runs/{name}"] if begun else what), "--jobs", "2"])
        records = sorted((place.folder / "runs" / name).glob("seed*/run.json"))
        place.note(**{f"{name}_unseen": summary([json.loads(path.read_text())["score"]["mean"] for path in records])})


def sb3_side(place: Place, task: str, trials: int, steps: int) -> None:
    """Search with Optuna and Stable-Baselines3 in two processes, then train the winner on the unseen seeds."""
    order = {"task": task, "trials": trials, "steps": steps, "journal": str(place.folder / "journal")}
    me = [sys.executable, str(Path(__file__).resolve()), "--work"]
    if place.lacks("search"):
        place.run("search", *([*me, json.dumps({**order, "what": "search", "seed": seed})] for seed in (0, 1)))
    trial = study_of(order, 0).best_trial
    place.note(winner={"trial": trial.number, "score": trial.value, **trial.params})
    files = {seed: place.folder / f"unseen{seed}.json" for seed in UNSEEN}
    if place.lacks("winner_unseen"):
        missing = [seed for seed, file in files.items() if not file.is_file()]
        orders = [{**order, "what": "train", "params": trial.params, "seeds": missing[i::2]} for i in (0, 1)]
        place.run("winner_training", *([*me, json.dumps(each)] for each in orders))
        place.note(winner_unseen=summary([json.loads(file.read_text()) for file in files.values()]))


def exited(pid: int) -> bool:
    """Return whether a process has ended, without collecting it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def summary(scores: list[float]) -> dict[str, Any]:
    """Return mean, 95 % interval of the mean (Student) and all scores."""
    from canter.functional.statistics import mean_interval

    return {"mean": float(np.mean(scores)), "interval": mean_interval(scores), "scores": scores}


def study_of(order: dict[str, Any], seed: int) -> Any:
    """Return the study of the other side, as rl-zoo makes it."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        sampler=optuna.samplers.TPESampler(n_startup_trials=10, seed=seed, multivariate=True, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=10, n_warmup_steps=EVALUATIONS // 3),
        storage=optuna.storages.JournalStorage(JournalFileBackend(order["journal"])),
        study_name="zoo",
        direction="maximize",
        load_if_exists=True,
    )


def work(order: dict[str, Any]) -> None:
    """Take part in a search of the other side, or train its winner."""
    import torch

    torch.set_num_threads(1)
    if order["what"] == "train":
        for seed in order["seeds"]:
            score = train_sb3(order, order["params"], seed, None)
            Path(f"unseen{seed}.json").write_text(json.dumps(score))
        return
    import optuna

    states = optuna.trial.TrialState
    ended = (states.COMPLETE, states.PRUNED, states.FAIL, states.RUNNING)
    study = study_of(order, order["seed"])
    while len(study.get_trials(deepcopy=False, states=ended)) < order["trials"]:
        study.optimize(lambda trial: objective(order, trial), n_trials=1, catch=(AssertionError, ValueError))


def objective(order: dict[str, Any], trial: Any) -> float:
    """Train a trial with five evaluations; the last one is its score."""
    params = {
        "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True),
        "gamma": 1 - trial.suggest_float("one_minus_gamma", 1e-4, 0.1, log=True),
        "clip_range": trial.suggest_float("clip_range", 0.1, 0.4),
        "ent_coef": trial.suggest_float("ent_coef", 1e-8, 0.1, log=True),
    }
    return train_sb3(order, params, 0, trial)


def train_sb3(order: dict[str, Any], params: dict[str, Any], seed: int, trial: Any) -> float:
    """Train for the steps of the order; return the mean return of the policy without noise."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    params = dict(params)
    if "one_minus_gamma" in params:
        params["gamma"] = 1 - params.pop("one_minus_gamma")
    fixed = dict(ZOO[order["task"]])
    number, normalize = fixed.pop("n_envs"), fixed.pop("normalize", False)
    env: Any = make_vec_env(order["task"], number, seed=seed)
    playing: Any = make_vec_env(order["task"], 1 if trial is not None else 10, seed=seed + 100_000)
    if normalize:
        env = VecNormalize(env, gamma=params["gamma"])
        playing = VecNormalize(playing, training=False, norm_reward=False)
    model = PPO("MlpPolicy", env, seed=seed, device="cpu", **fixed, **params)
    parts = EVALUATIONS if trial is not None else 1
    score = 0.0
    for part in range(1, parts + 1):
        model.learn(order["steps"] * part // parts - model.num_timesteps, reset_num_timesteps=False)
        if normalize:
            playing.obs_rms = env.obs_rms
        episodes = EPISODES if trial is not None else LAST_EPISODES
        score = float(evaluate_policy(model, playing, n_eval_episodes=episodes)[0])  # pyright: ignore[reportArgumentType]
        if trial is not None:
            trial.report(score, part)
            if trial.should_prune():
                import optuna

                raise optuna.TrialPruned
    return score


if __name__ == "__main__":
    main()
