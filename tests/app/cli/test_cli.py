import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from canter.app.cli import main
from canter.app.experiments import session
from canter.config import TrainConfig
from canter.config.files import read_config
from canter.config.presets import presets
from canter.core.plain import to_plain
from canter.nn.schedules import Constant


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs leave folders behind."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def say(capsys):
    """Runs a command in this process: what it prints, or its error line where it exits with code 2."""

    def run(*arguments):
        try:
            main(list(arguments))
        except SystemExit as leaving:
            printed = capsys.readouterr()
            if leaving.code == 0:
                return printed.out
            assert leaving.code == 2
            assert printed.err.startswith("canter: ")
            assert printed.err.count("\n") == 1
            return printed.err.strip()
        return capsys.readouterr().out

    return run


@pytest.fixture
def merged(say):
    """The settings that a command line leads to."""
    return lambda *arguments: yaml.safe_load(say("train", *arguments, "--print-config"))


def canter(*arguments):
    return subprocess.run([sys.executable, "-m", "canter", *arguments], capture_output=True, text=True, timeout=120)


def test_training_in_a_pipe_prints_lines_a_final_score_and_what_to_do_next():
    result = canter("train", "CartPole-v1", "--total-steps", "2000", "--seed", "1")
    assert result.returncode == 0, result.stderr
    assert "with its preset: 2,000 steps in 8 environments, seed 1" in result.stdout
    lines = [line for line in result.stdout.splitlines() if "explained variance" in line]
    assert [line.split()[0] for line in (lines[0], lines[-1])] == ["1,024", "2,048"]
    assert "\x1b" not in result.stdout
    score, *after = result.stdout[result.stdout.index("Final score: mean return") :].splitlines()
    assert re.search(r"over \d+ new episodes?, acting without noise", score)
    (report,) = (line.removeprefix("The report is in ") for line in after if line.startswith("The report is in "))
    assert Path(report).read_text().startswith("<!doctype html>")
    run = Path(report).parent
    program, *rest = zip(*(shlex.split(line)[:4] for line in after[after.index("What next?") + 1 :]), strict=True)
    # As they are typed here: with the path of the program where it is not on the PATH, and of this very run.
    assert {Path(name).name for name in program} == {"canter"}
    assert rest[0] == ("play", "report", "resume")
    assert {Path(path) for path in rest[1]} == {run}
    assert rest[2][1:] == ("--open", "--total-steps")


QUICK = ("tensor:cartpole", "--total-steps=512", "--algorithm.horizon=32", "--algorithm.num-minibatches=2")


def test_a_verbose_run_prints_a_block_for_every_rollout(say):
    text = say("train", *QUICK, "--console", "verbose")
    assert text.count("rollout statistics") == text.count("trainer statistics") == 2
    assert "clip_range                          0.2000" in text


def test_a_quiet_run_prints_only_its_beginning_and_its_end(say):
    text = say("train", *QUICK, "--console=quiet", "--success.ending=any")
    assert "steps/s" not in text
    assert "Final score" in text


def test_metrics_go_to_tensorboard_and_stay_there_on_resuming(say, tmp_path):
    say("train", *QUICK, "--name=one", "--log", "tensorboard")
    say("resume", "one", "--total-steps=1024", "--log=tensorboard", "--console=quiet")
    assert len(list((tmp_path / "runs" / "one" / "tensorboard").glob("events*"))) == 2


def test_a_run_in_another_folder_is_named_by_its_path(say, tmp_path):
    text = say("train", *QUICK, "--run-dir", str(tmp_path / "elsewhere"), "--name=two")
    assert f"canter play {tmp_path / 'elsewhere' / 'two'} " in text


def test_a_report_that_cannot_be_written_is_no_failure(say, monkeypatch):
    def fail(paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("canter.app.report.write_report", fail)
    assert "There is no report: [Errno 28] No space left on device" in say("train", *QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CartPol-v1"], "CartPole-v1"),
        (["tensor:cartpol"], "did you mean cartpole"),
        (["envpol:CartPole-v1"], "did you mean envpool"),
        (["CartPole-v1", "--num-envs", "0"], "num_envs=0 must be at least 1"),
        (["CartPole-v1", "--seed", "-1"], "seed=-1"),
        (["--preset", "Cartpol"], "unknown preset 'Cartpol': did you mean CartPole"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot read the config file: No such file"),
        (["--device", "gpu"], "device: 'gpu' is no device; use cpu, cuda or cuda:N"),
        (["--algorithm.gama", "1"], "unknown flag --algorithm.gama: did you mean --algorithm.gamma"),
        (["--gamma", "1"], "unknown flag --gamma: did you mean --algorithm.gamma or --algorithm.bonus-value.gamma?"),
        (["--algorithm.gamma", "x"], "algorithm.gamma: expected a number, got 'x'"),
        (["--algorithm.gamma", "[1"], "algorithm.gamma: cannot read '[1'"),
        (["--algorithm.gamma"], "--algorithm.gamma: expected one argument"),
        (["--algorithm.gamma", "-1e-3"], "algorithm.gamma=-0.001 must lie in 0..1"),
        (["--algorithm.surrogate", "clip"], "got 'clip'; did you mean clipped?"),
        (["--algorithm.optimizer.learning-rate.value", "1"], "it belongs to kind constant: set kind too"),
        (["--algorithm.entropy-coef", "1", "--algorithm.entropy-coef.end", "0"], "algorithm.entropy_coef.end: contrad"),
        (["--algorithm.num-minibatches", "7"], "num_minibatches=7 does not divide"),
        (["CartPole-v1", "--env.id", "Acrobot-v1"], "two environments: CartPole-v1 and --env.id Acrobot-v1"),
        (["CartPole-v1", "Acrobot-v1"], "unexpected argument 'Acrobot-v1'"),
        (["--console", "verbos"], "argument --console: unknown name 'verbos', did you mean verbose?"),
        (["--log", "tensorboard,wanbd"], "argument --log: unknown name 'wanbd', did you mean wandb?"),
        (["--success.ending", "terminate"], "success.ending: expected one of terminated, truncated, any"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments, message, say):
    assert message in say("train", *arguments, "--total-steps=1000")


def test_the_process_ends_with_code_2_and_no_traceback():
    result = canter("train", "CartPol-v1")
    assert result.returncode == 2
    assert "CartPole-v1" in result.stderr
    assert "Traceback" not in result.stderr


def test_bare_canter_and_help_list_the_commands(say):
    assert say() == say("--help")
    for command in ("train", "envs", "presets"):
        assert f"\n  {command} " in say()


def test_an_unknown_command_gets_the_nearest(say):
    assert say("trian") == "canter: unknown command 'trian': did you mean train?"


def test_train_help_shows_the_short_flags_and_how_to_set_the_rest(say):
    text = say("train", "--help")
    for flag in ("--preset", "--config", "--seed", "--total-steps", "--num-envs", "--device", "--dry-run"):
        assert f"\n  {flag}" in text
    assert "--algorithm.gamma 0.995" in text
    assert "--print-config` lists all of them" in text


def test_envs_and_presets_are_listed(say):
    envs = say("envs")
    assert re.search(r"tensor:quadrotor +Hover at a target", envs)
    assert "envpool:HalfCheetah-v4" in envs
    assert re.search(r"CartPole-v1 +preset CartPole\n", say("envs", "cartpole"))  # not one of its further ones
    rows = [line.split() for line in say("presets").splitlines()[1:]]
    assert rows == [[name, presets[name].env.id, f"{presets[name].total_steps:,}"] for name in presets]


def test_later_sources_win(merged, tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text("algorithm: {horizon: 32, gae_lambda: 0.5}\nseed: 5\n")
    default, preset = TrainConfig().algorithm, replace(presets["CartPole"].algorithm, horizon=48, gamma=0.97)
    monkeypatch.setitem(presets._items, "CartPole", replace(presets["CartPole"], algorithm=preset))
    assert merged("tensor:null")["algorithm"]["horizon"] == default.horizon
    assert merged("CartPole-v1")["algorithm"]["horizon"] == 48
    assert merged("CartPole-v1", "--config", str(file))["algorithm"]["horizon"] == 32
    plain = merged("CartPole-v1", "--config", str(file), "--algorithm.horizon", "16")
    assert plain["algorithm"]["horizon"] == 16
    assert plain["algorithm"]["gae_lambda"] == 0.5
    assert plain["algorithm"]["gamma"] == 0.97
    assert plain["seed"] == 5
    assert merged("CartPole-v1", "--config", str(file), "--seed", "6")["seed"] == 6


def test_the_environment_may_come_from_argument_flag_file_or_preset(merged, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env: {id: Acrobot-v1}\n")
    assert merged()["env"]["id"] == "CartPole-v1"
    assert merged("--env.id", "Pendulum-v1")["algorithm"]["gamma"] == presets["Pendulum"].algorithm.gamma
    from_file = merged("--config", str(file))
    assert (from_file["env"]["id"], from_file["env"]["num_envs"]) == ("Acrobot-v1", presets["Acrobot"].env.num_envs)
    assert merged("CartPole-v1", "--config", str(file))["env"]["id"] == "CartPole-v1"
    assert merged("--preset", "Hopper")["env"]["id"] == "Hopper-v5"
    file.write_text("seed: 3\n")
    assert merged("--preset", "Hopper", "--config", str(file))["env"]["id"] == "Hopper-v5"
    other = merged("tensor:null", "--preset", "Hopper")
    assert (other["env"]["id"], other["algorithm"]["horizon"]) == ("tensor:null", presets["Hopper"].algorithm.horizon)


@pytest.mark.parametrize("command", ["train", "check", "sweep"])
def test_a_settings_file_without_an_environment_trains_nothing(say, tmp_path, command):
    file = tmp_path / "config.yaml"
    file.write_text("seed: 3\n")
    for preset in ([], ["--preset", "none"]):
        said = say(command, "--config", str(file), *preset)
        assert f"{file} names no environment (env.id) that is known here: canter train ENV --config {file}" in said


def test_flags_reach_every_kind_of_setting(say, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env: {options: {kept: 1}}\n")
    text = say(
        *("train", "CartPole-v1"),
        *("--algorithm.optimizer.learning-rate", "1e-3", "--algorithm.gae_lambda=0.5", "--num-envs", "4"),
        *(
            "--algorithm.model.policy.hidden",
            "32,16",
            "--algorithm.recompute-advantage",
            "true",
            "--total-steps",
            "1e4",
        ),
        *("--algorithm.target-kl", "0.02", "--algorithm.model.critic.obs-groups", "critic", "--env.autoreset", "none"),
        *("--env.options.noise_scale", "1e-2", "--env.options.name", "x", "--config", str(file), "--print-config"),
        *("--algorithm.entropy-coef.kind", "linear", "--algorithm.entropy-coef.start", "0.1"),
    )
    printed = tmp_path / "printed.yaml"
    printed.write_text(text)
    config = read_config(printed).over(TrainConfig())
    ppo = config.algorithm
    assert ppo.optimizer.learning_rate == Constant(1e-3)
    assert (ppo.gae_lambda, ppo.recompute_advantage, ppo.target_kl) == (0.5, True, 0.02)
    assert (ppo.model.policy.hidden, ppo.model.critic.obs_groups) == ((32, 16), ("critic",))
    assert ppo.entropy_coef.initial == 0.1
    assert (config.env.num_envs, config.env.autoreset, config.total_steps) == (4, None, 10_000)
    assert config.env.options == {"kept": 1, "noise_scale": 0.01, "name": "x"}


def test_a_setting_of_the_presets_schedule_can_be_changed_alone(merged):
    preset = to_plain(presets["CartPole"])["algorithm"]["optimizer"]["learning_rate"]
    plain = merged("CartPole-v1", "--algorithm.optimizer.learning-rate.start", "2e-3")
    assert plain["algorithm"]["optimizer"]["learning_rate"] == {**preset, "start": 2e-3}


def test_printed_settings_are_a_config_file_that_prints_the_same(say, tmp_path):
    text = say("train", "Hopper-v5", "--seed", "3", "--algorithm.gamma", "0.9", "--print-config")
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert say("train", "--config", str(file), "--print-config") == text


def test_a_dry_run_builds_everything_prints_the_plan_and_does_not_train(say, monkeypatch):
    monkeypatch.setattr(session, "Trainer", None)
    sizes = ("--algorithm.horizon=64", "--algorithm.num-minibatches=4", "--algorithm.epochs=10", "--num-envs=8")
    text = say("train", "CartPole-v1", "--dry-run", "--total-steps=100000", *sizes)
    assert "batch = 64 steps x 8 envs = 512, 4 minibatches of 128, 10 epochs: 40 updates per rollout" in text
    assert "100,000 steps = 196 rollouts, 7,840 updates in total" in text
    assert "nothing was trained" in text
    assert "Final score" not in text


def test_a_run_is_kept_in_a_folder_and_can_be_extended(tmp_path, capsys):
    runs = ["--run-dir", str(tmp_path)]
    main(["train", *QUICK, "--name", "first", *runs])
    assert (tmp_path / "first" / "config.yaml").exists()
    assert (tmp_path / "latest").resolve() == (tmp_path / "first").resolve()
    main(["train", "--config", str(tmp_path / "first" / "config.yaml"), "--dry-run"])
    main(["resume", "latest", "--total-steps", "1024", *runs])
    out = capsys.readouterr().out
    assert "1,024 steps" in out
    assert len((tmp_path / "first" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "tensor:pendulum", "--name", "old"], "old already exists"),
        (["train", "tensor:pendulum", "--name", "../elsewhere"], "must be a plain folder name"),
        (["resume", "oldd"], "did you mean old"),
        (["resume", "o"], "could be any of old, other"),
    ],
)
def test_a_run_that_cannot_be_made_or_found_is_explained(tmp_path, capsys, arguments, message):
    for name in ("old", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--run-dir", str(tmp_path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path, say):
    assert "CartPole-v1" in say("train", "CartPol-v1")
    assert not (tmp_path / "runs").exists()
