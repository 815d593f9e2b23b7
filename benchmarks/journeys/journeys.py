"""Five users' first day with Canter, each by commands and programs in an empty folder.

    python benchmarks/journeys/journeys.py
    python benchmarks/journeys/journeys.py queueing robotics --out /tmp/journeys.json

A user of Stable-Baselines3, a queueing researcher, a robotics student, a reader of the code and the
lead of a team do what they came for. After each step the script checks what the user must see, and
stops at the first thing that is missing. `results/journeys.json` has every step, its seconds and
the lines that were checked.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results" / "journeys.json"
CANTER = [sys.executable, "-m", "canter"]


class Hurt(Exception):
    """A user did not see what they must see."""


class Journey:
    """A user in an empty folder, and the steps taken so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []

    def canter(self, *argv: str, sees: tuple[str, ...] = (), code: int = 0) -> str:
        """Run `canter ARGV`, check its exit code and that its output matches all patterns; return the output."""
        return self._run("canter " + " ".join(argv), [*CANTER, *argv], sees, code)

    def python(
        self, title: str, program: str, *, sees: tuple[str, ...] = (), stdin: str = "", pdb: bool = False
    ) -> str:
        """Run a program, check that its output matches all patterns, and return the output."""
        path = self.folder / f"{title}.py"
        path.write_text(program)
        command = [sys.executable, *["-m", "pdb"] * pdb, path.name]
        return self._run(f"python {'-m pdb ' * pdb}{path.name}", command, sees, 0, stdin)

    def check(self, title: str, holds: bool, found: object) -> None:
        """Record a statement about files or numbers; raise Hurt if it does not hold."""
        self.steps.append({"check": title, "found": found})
        if not holds:
            raise Hurt(f"{title}: found {found}")

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start `canter ARGV` and return the process."""
        self.steps.append({"starts": "canter " + " ".join(argv)})
        quiet = subprocess.DEVNULL
        return subprocess.Popen([*CANTER, *argv], cwd=self.folder, env=environment(), stdout=quiet, stderr=quiet)

    def copy(self, name: str) -> None:
        """Copy an environment of the user into the folder."""
        shutil.copy(HERE / "environments" / name, self.folder)

    def rows(self, run: str) -> list[dict[str, Any]]:
        """Return the log of a run."""
        return [json.loads(line) for line in (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]

    def _run(self, shown: str, command: list[str], sees: tuple[str, ...], code: int, stdin: str = "") -> str:
        start = time.perf_counter()
        ran = subprocess.run(
            command, cwd=self.folder, env=environment(), input=stdin, capture_output=True, text=True, timeout=300
        )
        text = ran.stdout + ran.stderr
        lines = {pattern: _matching_line(pattern, text) for pattern in sees}
        missing = [pattern for pattern, line in lines.items() if line is None]
        if ran.returncode != code or missing or "Traceback" in text:
            raise Hurt(f"{shown}\nexit code {ran.returncode} (expected {code}); not seen: {missing}\n{text}")
        seconds = round(time.perf_counter() - start, 1)
        self.steps.append({"runs": shown, "exit_code": code, "seconds": seconds, "sees": list(lines.values())})
        return text


def _matching_line(pattern: str, text: str) -> str | None:
    return next((line.strip()[:200] for line in text.splitlines() if re.search(pattern, line)), None)


def environment() -> dict[str, str]:
    """Return the environment of the user's processes: one thread, this Canter, no display."""
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source, "COLUMNS": "120"}


PREDICT = """
import gymnasium

import canter

model = canter.load("latest")
env = gymnasium.make("CartPole-v1")
obs, _ = env.reset(seed=0)
steps = 0
over = False
while not over:
    action, _ = model.predict(obs, deterministic=True)
    obs, reward, terminated, truncated, _ = env.step(int(action))
    steps += 1
    over = terminated or truncated
print("balanced for", steps, "steps")
"""


def stable_baselines3(user: Journey) -> None:
    """Type the flags of Stable-Baselines3, then train, watch, evaluate and load CartPole."""
    answers = {
        "--total-timesteps": "--total-steps",
        "--n-steps": "--algorithm.horizon",
        "--batch-size": "--algorithm.num-minibatches",
        "--learning-rate": "--algorithm.optimizer.learning-rate",
        "--ent-coef": "--algorithm.entropy-coef",
        "--verbose": "--console",
        "--tensorboard-log": "--log",
    }
    for theirs, ours in answers.items():
        user.canter("train", "CartPole-v1", theirs, "1", sees=(f"here it is {ours}",), code=2)
    train = ("train", "CartPole-v1", "--total-steps", "32768", "--seed", "1")
    user.canter(*train, sees=("Final score: mean return", r"What next\?"))
    user.canter("eval", "latest", "--episodes", "20", sees=("CartPole-v1", "mean"))
    score = json.loads((user.folder / "runs/latest/run.json").read_text())["score"]["mean"]
    user.check("CartPole has learned: mean return above 200 where random actions have 22", score > 200, score)
    user.canter("play", "latest", "--video", "cart.mp4", "--max-steps", "30", sees=("cart.mp4",))
    user.check("there is a video", (user.folder / "cart.mp4").stat().st_size > 0, "cart.mp4")
    user.python("predict", PREDICT, sees=(r"balanced for \d{2,} steps",))
    user.check("there is a report", (user.folder / "runs/latest/report.html").is_file(), "runs/latest/report.html")


def queueing(user: Journey) -> None:
    """Train an admission policy by its average reward in continuous time."""
    user.copy("admission.py")
    task = ("admission:Admission", "--allow-import", "admission", "--algorithm.objective", "average")
    task += ("--env.reset-steps", "500")
    timed = (*task, "--env.options.info-keys", "duration")
    typo = (*task, "--env.options.info-keys", "duratoin")
    user.canter("check", *typo, sees=("did you mean duration",), code=1)
    user.canter("check", *timed, sees=("Ready to train: 0 errors",))
    sees = (r"reward per time \d", r"Final score: long-run average \S+ ± \S+ per unit of time", "by long-run average")
    user.canter("train", *timed, "--total-steps", "32768", "--name", "queue", sees=sees)
    row = user.rows("queue")[-1]
    user.check("steps have their durations: between 1 / 1.9 and 1 / 0.9", 0.5 < row["env/duration"] < 1.2, row)
    gap = abs(row["value/reward_rate"] - row["lta/mean"])
    user.check("the estimated reward rate is near the measured one", gap < 0.3, [row["value/reward_rate"], gap])
    user.canter("eval", "queue", "--average", "1000", sees=("long-run average of the reward per unit of time",))
    user.canter("report", "queue")
    page = (user.folder / "runs/queue/report.html").read_text()
    headline = re.findall(r"<dt>(.*?)</dt>", page)[0]
    user.check("the report's headline is the long-run average", headline == "Long-run average", headline)
    user.canter("runs", sees=("admission:Admission",))


def robotics(user: Journey) -> None:
    """Train an own MuJoCo environment, lose the process early, resume, and compare with a whole run."""
    user.copy("arm.py")
    task = ("arm:Arm", "--allow-import", "arm", "--env.reset-steps", "100")
    user.canter("train", *task[:1], sees=("--allow-import arm",), code=2)
    user.canter("check", *task, sees=("Ready to train: 0 errors", "the score to beat"))
    train = ("train", *task, "--total-steps", "24576", "--seed", "2", "--console", "lines")
    user.canter(*train, "--name", "whole", sees=("Final score: mean return",))
    killed = user.start(*train, "--name", "killed")
    log = user.folder / "runs/killed/metrics.jsonl"
    while not (log.is_file() and log.read_text().count("\n") >= 2):
        if killed.poll() is not None:
            raise Hurt("the run ended before it could be killed")
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    user.check("kill -9 came before the first scheduled checkpoint", len(user.rows("killed")) < 24, "SIGKILL")
    user.canter("runs", sees=(r"killed .*interrupted",))
    sees = (
        "Starting at step 0",
        "all episodes restart: the state of .*Arm.* cannot be saved",
        "Final score: mean return",
    )
    user.canter("resume", "killed", "--console", "lines", sees=sees)
    ends = [user.rows(run)[-1]["return"] for run in ("whole", "killed")]
    user.check("whole and resumed run hold the arm up: return above 80 of 100", min(ends) > 80, ends)
    logged = [row["iteration"] for row in user.rows("killed")]
    user.check("its log has every iteration once", logged == list(range(1, 25)), len(logged))
    user.check("its metrics are logged", "env/angle" in user.rows("killed")[-1], user.rows("killed")[-1]["env/angle"])


PLAIN = """
from dataclasses import replace

import canter

config = replace(canter.preset_for("CartPole-v1"), execution=canter.ExecutionConfig(engine="plain"))
with canter.Trainer(config) as trainer:
    rollout = trainer.collect()
    metrics = trainer.update(rollout)
print("losses:", sorted(name for name in metrics if name.startswith("loss/")))
"""

CALLS = """
import runpy
import sys

from canter.engines import native

kernels = vars(native.compiled()).values() if native.AVAILABLE else ()
addresses = set(map(id, kernels))
entered = set()
modules = set()


def note(frame, event, function):
    if event == "c_call" and id(function) in addresses:
        entered.add(function.__name__)
    elif event == "call":
        modules.add(frame.f_globals.get("__name__", ""))


sys.setprofile(note)
runpy.run_path("ENGINE.py", run_name="__main__")
sys.setprofile(None)
print("kernels in C:", len(entered) if native.AVAILABLE else "not built")
print("functions of:", sorted(name for name in modules if name.startswith("canter.functional")))
"""


def code_reader(user: Journey) -> None:
    """Find the files that an update runs, run it without C, and stop in it with the debugger."""
    path = subprocess.run(
        [sys.executable, str(ROOT / "tests/reading_path.py"), "iteration"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    files = re.findall(r"(\S+\.py)", path.stdout)
    user.check("the reading path names advantages and losses", "functional/returns.py" in files, files)
    user.python("plain", PLAIN, sees=("loss/policy",))
    sees = (
        "kernels in C: (0|not built)",
        "canter.functional.losses.*canter.functional.optimization.*canter.functional.returns",
    )
    user.python("calls", CALLS.replace("ENGINE", "plain"), sees=sees)
    user.python("auto", PLAIN.replace('"plain"', '"auto"'), sees=("loss/policy",))
    user.python("calls_auto", CALLS.replace("ENGINE", "auto"), sees=("kernels in C: ([1-9]|not built)",))
    source = ast.parse((ROOT / "src/canter/functional/returns.py").read_text())
    (gae,) = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "gae"]
    line = gae.body[1].lineno  # after the docstring
    debugger = f"break canter/functional/returns.py:{line}\ncontinue\nwhere\nargs\nquit\n"
    user.python("plain", PLAIN, stdin=debugger, pdb=True, sees=(r"functional/returns\.py\(\d+\)gae\(\)", "gae_lambda"))
    flags = ("--execution.engine", "plain", "--total-steps", "4096", "--console", "lines")
    user.canter("train", "CartPole-v1", *flags, "--name", "plain", sees=("engine: plain", "Final score"))


def team_lead(user: Journey) -> None:
    """Sweep seeds and a setting, compare, export the best run and train it on with a logged change."""
    flags = ("--seed", "0,1", "--algorithm.gamma", "0.9,0.98", "--total-steps", "8192", "--name", "study")
    user.canter("sweep", "CartPole-v1", *flags, "--jobs", "2", sees=("0 of 4 to go",))
    runs = json.loads(user.canter("runs", "--json"))
    user.check("four runs are finished", [run["status"] for run in runs] == ["finished"] * 4, len(runs))
    user.canter("report", "runs/study", "--out", "comparison.html", sees=("comparison.html",))
    page = (user.folder / "comparison.html").read_text()
    user.check("the comparison has both settings", "0.98" in page and "gamma" in page, f"{len(page) // 1000} kB")
    best = max(runs, key=lambda run: run["score"]["mean"])["path"]
    user.canter("export", best, "--output", "controller.onnx", sees=("the same actions on 1,000 observations",))
    user.check("the export is there", (user.folder / "controller.onnx").stat().st_size > 0, "controller.onnx")
    more = ("resume", best, "--total-steps", "12288", "--console", "lines")
    user.canter(*more, "--algorithm.optimizer.learning-rate", "1e-4", sees=("algorithm.optimizer.learning_rate",))
    edits = (user.folder / best / "edits.jsonl").read_text()
    user.check("the changed setting is logged", "learning_rate" in edits and "total_steps" in edits, edits.strip())
    user.canter("resume", best, "--env.num-envs", "64", sees=("--env.num-envs cannot change",), code=2)
    config = user.folder / best / "config.yaml"
    config.write_text(re.sub(r"(?m)^(\s*entropy_coef:).*", r"\1 0.05", config.read_text()))
    user.canter("resume", best, "--total-steps", "16384", sees=("entropy_coef", "--accept-edits"), code=2)


JOURNEYS: dict[str, Callable[[Journey], None]] = {
    "stable-baselines3": stable_baselines3,
    "queueing": queueing,
    "robotics": robotics,
    "code-reader": code_reader,
    "team-lead": team_lead,
}


def walk(name: str) -> dict[str, Any]:
    """Walk one journey in an empty folder; raise Hurt if something is missing."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        user = Journey(Path(folder).resolve())
        JOURNEYS[name](user)
        text = json.dumps(user.steps).replace(str(user.folder), ".").replace(sys.executable, "python")
        text = text.replace(str(ROOT), "CANTER")
    return {
        "does": JOURNEYS[name].__doc__,
        "seconds": round(time.perf_counter() - start, 1),
        "steps": json.loads(text),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Walk the journeys of five users.")
    parser.add_argument("journeys", nargs="*", choices=[*JOURNEYS, []], help="all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 1)
    found: dict[str, Any] = {"cores": os.cpu_count(), "load_average": {"before": load}, "journeys": {}}
    for name in options.journeys or JOURNEYS:
        found["journeys"][name] = walk(name)
        print(f"{name}: {found['journeys'][name]['seconds']} s, no hurt", flush=True)
    found["seconds"] = round(sum(journey["seconds"] for journey in found["journeys"].values()), 1)
    found["load_average"]["after"] = round(os.getloadavg()[0], 1)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
