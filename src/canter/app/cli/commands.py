"""The commands of `canter` as one table: functions, arguments and help."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from canter.app.cli.arguments import (
    CONFIG_ARGUMENTS,
    CONFIG_FLAGS,
    ENV,
    EXPORT_ARGUMENTS,
    IMPORT_ARGUMENTS,
    OUTPUT_ARGUMENTS,
    PBT_ARGUMENTS,
    RUN,
    SIM2SIM_ARGUMENTS,
    TRAIN_ARGUMENTS,
    run_dir,
)
from canter.app.cli.parser import Argument, Command, Parser, SettingFlags, duration, name_in, positive_int
from canter.runs.records import CONFIG, RUNS

STDOUT = "-"
PLAY_MAX_STEPS = 10_000
"""Steps that `canter play` plays by default; some tasks never end."""

POLICY_SOURCE = "folder of a run, `latest`, the beginning of a run's name, or a policy file"
POLICY_ARGUMENTS = (
    Argument("RUN", POLICY_SOURCE),
    Argument("--policy", "best, final, or a policy file; by default best if it exists, else final", "NAME"),
    Argument("--seed", "seed of the random streams; by default the run's seed", "N", int),
    Argument("--device", "by default the run's, or cpu if that is not available", "NAME"),
    run_dir(),
)
ACTING_ARGUMENTS = (
    Argument("--stochastic", "sample actions instead of taking the mode"),
    Argument("--player", "a player that you registered, instead of Canter's", "NAME", default="standard"),
)
PLAN_ARGUMENTS = (
    Argument("--jobs", "runs at a time; by default one for each core", "N", positive_int),
    *CONFIG_ARGUMENTS,
    run_dir("the folder of all runs goes"),
    Argument("--name", "name of that folder; by default environment and time", "NAME"),
)
ENV_FLAGS = SettingFlags(
    {"--env": ("env.id", "NAME", "another environment, with the same observations and actions")},
    """\
Settings of the environment are flags with the same names as in training: --env.options.NAME VALUE,
--env.wrappers.NAME.KEY VALUE, --env.reset-steps N and the others. Settings that are not given are the run's.""",
    section="env.",
)
NUM_ENVS_FLAG = {
    "--num-envs": ("env.num_envs", "N", "environments stepped together; by default as in the run, at most the episodes")
}

COMMANDS: dict[str, Command] = {
    "demo": Command(
        "training:demo_command",
        "Train CartPole-v1 for about ten seconds and say what to try next.",
        (
            Argument("--folder", "new folder of the run", "DIR", Path, RUNS / "demo"),
            Argument("--seconds", "seconds of training at most", "N", float, 10),
        ),
        details="It needs no network and no GPU.",
    ),
    "train": Command(
        "training:train_command",
        "Train a policy and print its progress.",
        (Argument("ENV", ENV, nargs="?"), *TRAIN_ARGUMENTS),
        settings=CONFIG_FLAGS,
        ranked=True,
    ),
    "distill": Command(
        "training:distill_command",
        "Train a student to imitate a teacher that sees more.",
        (
            Argument("TEACHER", "policy file or run folder; `canter import` makes one of a checkpoint", nargs="?"),
            Argument("ENV", ENV, nargs="?"),
            *TRAIN_ARGUMENTS,
        ),
        details="""\
The student learns to act like its teacher in the states that it reaches, and reads the observation groups
--algorithm.policy.obs-groups. If the teacher's groups have other names in ENV: --algorithm.teacher-obs
'{policy: critic}'. To continue by reward: canter train ENV --init-from STUDENT""",
        settings=CONFIG_FLAGS,
        ranked=True,
    ),
    "resume": Command(
        "training:resume_command",
        "Continue a run from its newest checkpoint.",
        (
            RUN,
            Argument("--accept-edits", f"use the settings that were edited in the run's {CONFIG}"),
            Argument("--from-scratch", "restart at step 0; the existing files are set aside"),
            run_dir(),
            *OUTPUT_ARGUMENTS,
        ),
        details="It goes on exactly as if it had never stopped. Flags change settings from there on, and are recorded.",
        settings=SettingFlags(
            {"--total-steps": ("total_steps", "N", "train up to this total of transitions; may extend the run")}
        ),
        ranked=True,
    ),
    "sweep": Command(
        "plans:sweep_command",
        "Train many runs: seeds, and settings with several values.",
        (
            Argument("ENV", "environment id, or the folder of a sweep to resume", nargs="?"),
            *PLAN_ARGUMENTS,
            Argument("--print-commands", "print the command of each run and stop"),
        ),
        details="""\
Each runs in its own process and folder on this machine, several at a time. Every setting may have several values:
`--seed 0..4` is a range, `--algorithm.gamma 0.98,0.99` a list, and a flag that is given twice has both values, as
needed by settings that are lists themselves. All combinations are run.

`canter sweep FOLDER` resumes a sweep: finished runs are kept, interrupted runs continue from their checkpoints.""",
        settings=CONFIG_FLAGS,
    ),
    "tune": Command(
        "plans:tune_command",
        "Search the settings of a task, or train a population.",
        (
            Argument("ENV", "environment id, or the folder of a search to continue"),
            Argument("--trials", "settings to try", "N", positive_int),
            Argument("--budget", "time for all of it, such as 90s, 30m, 2h or 1h30m", "TIME", duration),
            Argument("--space", "YAML file of settings with their ranges", "FILE", Path),
            Argument(
                "--objective",
                "score of a run: return, of the policy in new episodes (the default), auc, the mean return over the "
                "steps of training, seconds-to:GOAL, the seconds of training until the return reaches a goal, or "
                "return-in:SECONDS, of the policy after that training time",
                "NAME",
            ),
            Argument("--seeds", "seeds of the best trials in the search, at most (default 3)", "N", positive_int),
            Argument("--finalists", "trials that train on fresh seeds (default 3)", "N", positive_int),
            Argument("--final-seeds", "fresh seeds (default 5)", "N", positive_int),
            Argument("--population", "trials side by side in one program, on tensor environments", "N", positive_int),
            *PBT_ARGUMENTS,
            *PLAN_ARGUMENTS,
            *IMPORT_ARGUMENTS,
        ),
        details="""\
A search has separate processes, Optuna's TPE sampler, halving, and several seeds for the best trials. Ranges:
  --space.algorithm.optimizer.learning-rate 1e-5..1e-2:log    on a logarithmic scale
  --space.algorithm.gamma 0.9..0.999:log1m                    the distance from 1 is logarithmic
  --space.algorithm.horizon 64,128,256                        values
  --space.algorithm.epochs 0.5x..2x                           relative to the base: preset, file and flags
Without ranges the algorithm's own are searched. The winner is best.yaml: canter train ENV --config best.yaml

`canter tune FOLDER` continues a search with the same trials; --trials or --budget extend it.

`canter tune ENV --pbt` trains a population instead: at every interval the worst members take the weights of the best
and change their settings within the ranges. `canter tune FOLDER` continues one with the same decisions.""",
        settings=replace(CONFIG_FLAGS, ranges=True),
    ),
    "play": Command(
        "policies:play_command",
        "Watch a policy in a window, or record a video of it.",
        (
            Argument("RUN", f"{POLICY_SOURCE}; not needed with --agent and --env", nargs="?"),
            *POLICY_ARGUMENTS[1:],
            Argument("--agent", "act without a policy: zero or random actions", "NAME", name_in("play.player:AGENTS")),
            Argument("--video", "record to this new .mp4 or .gif file instead of opening a window", "FILE", Path),
            Argument("--caption", "show step, return and action in a strip below the picture"),
            Argument(
                "--viewer",
                "mjlab's viewer: native, a window (its tasks' default if there is a display), or viser, a browser",
                "NAME",
                name_in("play.video:VIEWERS"),
            ),
            Argument("--episodes", "episodes to play (default 1; no limit in a viewer)", "N", positive_int),
            Argument(
                "--max-steps",
                f"steps to play at most (default {PLAY_MAX_STEPS:,}; no limit in a viewer)",
                "N",
                positive_int,
            ),
            *ACTING_ARGUMENTS,
            Argument("--override-std", "act with noise of this standard deviation (Gaussian policies)", "X", float),
        ),
        settings=ENV_FLAGS,
    ),
    "eval": Command(
        "policies:eval_command",
        "Evaluate a policy over many episodes.",
        (
            *POLICY_ARGUMENTS,
            Argument("--episodes", "episodes to play", "N", positive_int, 100),
            Argument(
                "--json",
                "write statistics and episodes to a new FILE, or to standard output",
                "FILE",
                nargs="?",
                const=STDOUT,
            ),
            Argument(
                "--average", "for endless tasks: reward per unit of time over STEPS of each env", "STEPS", positive_int
            ),
            *ACTING_ARGUMENTS,
            Argument("--max-steps", "steps of each environment to stop after", "N", positive_int, 1_000_000),
        ),
        details="The first episodes of every environment count.",
        settings=replace(ENV_FLAGS, short={**ENV_FLAGS.short, **NUM_ENVS_FLAG}),
    ),
    "export": Command(
        "policies:export_command",
        "Write a policy as ONNX, torch.export, C or NumPy files that run without Canter.",
        (*POLICY_ARGUMENTS, *EXPORT_ARGUMENTS),
        details="Each file is run on real observations and kept only if its actions equal the policy's. The policy's\n"
        "contract, a YAML file, says what the numbers mean.",
        settings=ENV_FLAGS,
    ),
    "sim2sim": Command(
        "policies:sim2sim_command",
        "Run an exported policy in plain MuJoCo, and compare its tracking with the training simulator's.",
        (*POLICY_ARGUMENTS, *SIM2SIM_ARGUMENTS),
        details="""\
The policy's C header runs on the CPU with joints, gains, default pose, action scale and time steps of its contract, and
tracks the velocity commands of the training simulator. It is exported if the run has none. Names that differ are
refused.""",
        settings=ENV_FLAGS,
    ),
    "check": Command(
        "tools:check_command",
        "Check an environment and its settings before training.",
        (
            Argument("ENV", "environment id; by default CartPole-v1", nargs="?"),
            *CONFIG_ARGUMENTS,
            *IMPORT_ARGUMENTS,
            Argument("--threads", "only measure the number of threads with which an update is fastest here"),
        ),
        details="It looks at spaces, episode ends, rewards and seeds in a few random steps, and at the arithmetic of\n"
        "the run. The exit code is 1 if something cannot work.",
        settings=CONFIG_FLAGS,
    ),
    "import": Command(
        "tools:import_command",
        "Convert a settings file of rl_games or RSL-RL.",
        (
            Argument("FILE", "the file; FILE.py:NAME for one class or function of several"),
            Argument("--output", "file for the settings; the report is written next to it", "FILE", Path),
            Argument("--config", "for a checkpoint: the settings that it was trained with", "FILE"),
            Argument("--device", "for a checkpoint: device of the networks", "NAME"),
            Argument("--env", "the environment, if the file does not name one that is known here", "ID"),
            Argument("--num-envs", "environments, if the file leaves them to a script", "N", int),
            *IMPORT_ARGUMENTS,
        ),
        details="""\
The file is one of rl_games (YAML with `params`) or RSL-RL (YAML, or Python as in Isaac Lab and mjlab, which is read and
never run). Every key of it is in the report: mapped, mapped with a difference, without effect in the source library, or
refused with the reason.

A checkpoint (.pt, .pth) becomes a run folder that can be played, evaluated, exported and trained further; --config is
the settings file that it was trained with. Nothing in it is run.""",
    ),
    "doctor": Command(
        "tools:doctor_command",
        "Say why a run does not learn, or what is wrong with an environment, and what to change.",
        (
            Argument("RUN", f"{RUN.help}; or an environment id, before a run"),
            Argument("--json", "print the findings as JSON"),
            Argument(
                "--try",
                "continue copies of the run for N iterations (default a tenth of the run) with and without the first "
                "change, with three seeds each, and compare the returns",
                "N",
                positive_int,
                nargs="?",
                const=0,
            ),
            run_dir(),
            *CONFIG_ARGUMENTS,
            *IMPORT_ARGUMENTS,
        ),
        details="""\
Of a run, finished or running, it prints at most three findings: evidence, cause and the flags to change. A healthy run
has none. Of an environment it also prints what random and constant actions earn; nothing is trained.""",
        settings=CONFIG_FLAGS,
    ),
    "explain": Command(
        "tools:explain_command",
        "Find the cause of NaN or infinity in a run.",
        (RUN, run_dir()),
        details="The iteration is replayed eagerly on the CPU, to name the first operation and the environment that\n"
        "produced it. The folder may come from another machine.",
    ),
    "runs": Command(
        "listing:runs_command",
        "List the runs and their progress.",
        (run_dir(), Argument("--json", "print everything known about the runs as JSON")),
        details="The newest is first. SCORE is that of the final policy in new episodes without noise, or its reward\n"
        "per unit of time if no episodes end.",
        light=True,
    ),
    "report": Command(
        "listing:report_command",
        "Write a page about one run, or one that compares several.",
        (
            Argument("RUNS", "folder of a run or of runs, `latest`, or the beginning of names", nargs="+"),
            Argument("--out", "by default report.html in the run's folder, or here for several", "FILE", Path),
            Argument("--threshold", "the return for which the time to reach it is reported", "X", float),
            Argument("--open", "show it in the browser"),
            run_dir(),
        ),
        details="It is one HTML file that needs no network: curves, losses, time, settings and machine. Runs that\n"
        "differ only in their seed are shown as one curve with its uncertainty.",
    ),
    "envs": Command(
        "listing:envs_command",
        "List the environments and the form of their ids.",
        (Argument("FILTER", "part of an id, such as cart or ALE/", nargs="?"),),
        details="With FILTER all ids that contain it, those of Gymnasium and of installed packages included.",
        light=True,
    ),
    "presets": Command(
        "listing:presets_command",
        "List the presets: known-good settings.",
        details="They are found by environment id, or by name with --preset.",
        light=True,
    ),
}


def parse_arguments(name: str, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of a command; `settings` has the texts of setting flags by key."""
    return Parser(name, COMMANDS[name]).parse(argv)
