"""The first success with an environment of one's own: Canter beside Stable-Baselines3, each with its defaults.

    make .venv-peers/installed && .venv-peers/bin/python benchmarks/journeys/first_success.py

A user has one file with a Gymnasium class and writes the shortest program that each library's first page shows. Both
train until the mean return of the last 100 episodes is at the goal (0.7 degrees off; doing nothing is 8 degrees off).
Counted are seconds of the clock and of the processor from the start of the process, imports included, until the goal
and until the program ends. Canter has then also written run folder, score of 100 new episodes and report; the other
program has saved its policy. `results/first_success.json` has every seed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

SEEDS, GOAL = 5, -28.0
RESULTS = Path(__file__).parent / "results" / "first_success.json"

THERMOSTAT = '''
import gymnasium
import numpy as np
from gymnasium import spaces


class Thermostat(gymnasium.Env):
    """Heat a room, or do not, so that it stays at 20 degrees while it cools; forty steps."""

    observation_space = spaces.Box(-20.0, 20.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.error, self.t = self.np_random.uniform(-5.0, 5.0), 0
        return np.array([self.error], np.float32), {}

    def step(self, action):
        self.error, self.t = self.error + (1.0 if action == 1 else 0.0) - 0.4, self.t + 1
        return np.array([self.error], np.float32), -abs(self.error), False, self.t == 40, {}
'''

CANTER = """
import canter
from thermostat import Thermostat

result = canter.train(Thermostat, seed=SEED, total_steps=1e6, until={"mean_return": GOAL}, console="quiet")
""".strip()

SB3 = """
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from thermostat import Thermostat


class Until(BaseCallback):
    def _on_step(self):
        recent = self.model.ep_info_buffer
        return len(recent) < 100 or sum(episode["r"] for episode in recent) / 100 < GOAL


model = PPO("MlpPolicy", Thermostat(), seed=SEED)
model.learn(1_000_000, callback=Until())
model.save("thermostat")
""".strip()

AT_GOAL = {
    "canter": "import canter.app.experiments.session as _s\n_old = _s.final_score\n"
    "def _told(*a, **k):\n    _mark()\n    return _old(*a, **k)\n_s.final_score = _told\n",
    "stable-baselines3": "from stable_baselines3 import PPO as _P\n_old = _P.save\n"
    "def _told(*a, **k):\n    _mark()\n    return _old(*a, **k)\n_P.save = _told\n",
}
"""Puts a stopwatch where training has ended; no part of what a user writes."""
STEPS = {
    "canter": "steps = json.loads(open(result.path / 'metrics.jsonl').read().splitlines()[-1])['env_steps']",
    "stable-baselines3": "steps = model.num_timesteps",
}
MARK = """
import json, resource, sys, time
_START = float(sys.argv[1])
_marks = []
def _mark():
    used = resource.getrusage(resource.RUSAGE_SELF)
    _marks.append((time.time() - _START, used.ru_utime + used.ru_stime))
"""


def once(library: str, program: str, seed: int) -> dict[str, Any]:
    """One user, one process, an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "thermostat.py").write_text(THERMOSTAT)
        text = program.replace("SEED", str(seed)).replace("GOAL", str(GOAL))
        end = f"_mark()\n{STEPS[library]}\nprint(json.dumps([_marks, steps]))"
        Path(folder, "program.py").write_text("\n".join([MARK, AT_GOAL[library], text, end]))
        argv = [sys.executable, "program.py", str(time.time())]
        ran = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True, env=environment())
    (goal, ended), steps = json.loads(ran.stdout.splitlines()[-1])
    names = ("seconds_to_goal", "processor_to_goal", "seconds_in_all", "processor_in_all")
    return {"seed": seed, "env_steps": steps} | {
        name: round(value, 2) for name, value in zip(names, (*goal, *ended), strict=True)
    }


def environment() -> dict[str, str]:
    """One thread for torch, which is the fastest for networks of this size in both."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    load, programs = os.getloadavg(), {"canter": CANTER, "stable-baselines3": SB3}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for seed in range(SEEDS):  # in turns, so that a busy machine is so for both
        for name, program in programs.items():
            rows[name].append(once(name, program, seed))
    found: dict[str, Any] = {
        "goal": f"mean return of the last 100 episodes at {GOAL}",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": {"before": [round(x, 1) for x in load], "after": [round(x, 1) for x in os.getloadavg()]},
        "note": "a load above the number of cores means that other programs ran at the same time",
        "versions": {name: version(name) for name in ("torch", "gymnasium", "stable-baselines3")},
    }
    for name, program in programs.items():
        keys = rows[name][0].keys() - {"seed"}
        found[name] = {
            "lines_of_program": len([line for line in program.splitlines() if line.strip()]),
            "median": {key: median(row[key] for row in rows[name]) for key in sorted(keys)},
            "seeds": rows[name],
        }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
