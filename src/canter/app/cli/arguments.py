"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path

from canter.app.cli.parser import (
    Argument,
    SettingFlags,
    comma_separated,
    name_in,
    one_of,
    positive_int,
    truth,
    whole_number,
)
from canter.runs.records import RUNS


def run_dir(contents: str = "runs are looked for") -> Argument:
    """Return the flag for the folder of all runs."""
    return Argument("--run-dir", f"where {contents}", "DIR", Path, RUNS)


CONFIG_ARGUMENTS = (
    Argument(
        "--preset", "preset instead of the environment's own, or none for the defaults (`canter presets`)", "NAME"
    ),
    Argument("--config", "YAML file of settings, all or some", "FILE"),
)
OUTPUT_ARGUMENTS = (
    Argument(
        "--console",
        "live (a table), lines (one every few seconds), verbose (a block per rollout), quiet; auto: live on a terminal",
        "KIND",
        name_in("app.console.console:CONSOLES", "auto"),
        "auto",
    ),
    Argument(
        "--final-episodes",
        "episodes of the final evaluation, 0 for none (default 100, or as many as take a fifth of the steps)",
        "N",
        whole_number,
    ),
    Argument(
        "--log",
        "metrics also to tensorboard, wandb or both: --log tensorboard,wandb",
        "NAMES",
        comma_separated(name_in("app.experiments.session:LOGS")),
        [],
    ),
)
IMPORT_ARGUMENTS = (
    Argument("--parity", "settings of another library: keep its numbers exactly instead of using Canter's own forms"),
    Argument("--source", "settings of rl_games: its release, rl_games-1.6.1, -1.6.5 or -2.0", "RELEASE"),
    Argument("--agents", "settings of another library: agents in each environment", "N", int, 1),
    Argument("--set", "settings of another library: the value of ${KEY} in the file", "KEY=VALUE", repeatable=True),
    Argument("--without", "settings of another library: leave out a key that would be refused", "KEY", repeatable=True),
)
TRAIN_ARGUMENTS = (
    *CONFIG_ARGUMENTS,
    run_dir("the run's folder goes"),
    Argument("--name", "name of that folder; by default environment, seed and time", "NAME"),
    Argument("--resume-if-present", "resume the run of that --name if it exists"),
    Argument(
        "--init-from",
        "start with the weights of another run with the same networks; from a run of another algorithm, or from a "
        "policy file, with its policy",
        "RUN",
    ),
    Argument("--init-optimizer", "with --init-from: load the state of the optimizers too"),
    Argument("--init-fresh-statistics", "with --init-from: start with new statistics of observations and values"),
    *OUTPUT_ARGUMENTS,
    *IMPORT_ARGUMENTS,
    Argument("--print-config", "print the merged settings as YAML and stop"),
    Argument("--dry-run", "build environment and algorithm, print what would happen and stop"),
)
RUN = Argument("RUN", "folder of the run, `latest`, or the beginning of its name")

ENV = "environment id: Gymnasium's, envpool:ID or tensor:NAME; by default CartPole-v1 (see `canter envs`)"
CONFIG_FLAGS = SettingFlags(
    {
        "--algorithm": ("algorithm.kind", "NAME", "{algorithms}; the algorithm's preset for the environment is used"),
        "--seed": ("seed", "N", "seed of all random streams"),
        "--total-steps": ("total_steps", "N", "transitions to train for, over all environments"),
        "--num-envs": ("env.num_envs", "N", "environments stepped together, over all ranks"),
        "--device": ("device", "NAME", "device of networks and tensors: cpu, cuda, cuda:1, ..."),
    },
    """\
Every setting is a flag by its path, and keys of a file are the same paths:
  --algorithm.gamma 0.995
  --algorithm.optimizer.learning-rate 3e-4            a constant number
  --algorithm.optimizer.learning-rate.kind linear     or a schedule (constant, linear, step, adaptive_kl) ...
  --algorithm.optimizer.learning-rate.start 1e-3      ... with its own settings
  --algorithm.model.policy.hidden 256,256             a list
  --env.options.NAME VALUE                            a keyword argument of the environment

`canter train ENV --print-config` lists all of them with their values, ready to be saved and edited for --config.
Later sources win: defaults < preset < file < flags.""",
)

EXPORT_OBSERVATIONS = 1000
EXPORT_ARGUMENTS = (
    Argument(
        "--to",
        "formats of the files in the run's exports folder: onnx, torch, c, numpy (default onnx,torch), or leapp, which "
        "is onnx with LEAPP's YAML file",
        "FORMATS",
        comma_separated(name_in("play.export:SUFFIXES", "leapp")),
    ),
    Argument(
        "--output",
        "one new file, .onnx, .pt2, .h or .npz, instead of --to; or .pt for scripts of RSL-RL, .pth for those of "
        "rl_games",
        "FILE",
        Path,
    ),
    Argument("--int8", "C header with weights of 8 bits; prints how much its actions differ"),
    Argument("--bench", "measure one step of each file on one core of this machine"),
    Argument("--observations", "real observations to compare on", "N", positive_int, EXPORT_OBSERVATIONS),
)
SIM2SIM_ARGUMENTS = (
    Argument("MODEL", "XML file of the robot in MuJoCo, with the joint names of the contract", type=Path),
    Argument("--to", "simulator to run in", "NAME", one_of("mujoco"), "mujoco"),
    Argument("--robots", "robots, each with its own commands", "N", positive_int, 16),
    Argument("--seconds", "seconds of each robot", "N", positive_int, 10),
)
PBT_ARGUMENTS = (
    Argument("--pbt", "train a population; also the section pbt of a settings file of rl_games or Isaac Lab"),
    Argument("--pbt.members", "runs of the population (default 8)", "N", positive_int),
    Argument(
        "--pbt.interval",
        "transitions between comparisons, an iteration at least (default a twentieth of the steps)",
        "N",
        positive_int,
    ),
    Argument(
        "--pbt.rule",
        "truncation, the worst fifth copies the best (the default), or threshold, the rule of rl_games and Isaac Lab",
        "NAME",
        one_of("truncation", "threshold"),
    ),
    Argument("--pbt.share", "share that copies and that is copied, with truncation (default 0.2)", "X", float),
    Argument("--pbt.resample", "probability of a new sample of a copied setting (default 0.25)", "X", float),
    Argument("--pbt.threshold-std", "standard deviations from the mean, with threshold (default 0.1)", "X", float),
    Argument("--pbt.threshold-abs", "distance from the mean at least, with threshold (default 0.05)", "X", float),
    Argument("--pbt.mutation-rate", "probability of a changed setting, with threshold (default 0.25)", "X", float),
    Argument("--pbt.spread", "sample the initial settings (default true); false: those of the base", "BOOL", truth),
    Argument("--pbt.score", "return (the default), or a metric of the log", "NAME"),
    Argument("--pbt.episodes", "episodes of an evaluation (default 20)", "N", positive_int),
)
