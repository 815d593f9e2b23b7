"""`canter import`, and `canter train` with a file of a source library."""

import json

import pytest
import torch
import yaml
from theirs import RL_GAMES, RSL_RL, changed, rl_games

import canter
from canter.app.cli import main
from canter.compat import import_config
from canter.compat.pickled_file import read_pickled
from canter.config import TrainConfig
from canter.config.files import read_config
from canter.core.registry import UserError
from canter.nn.policy_loading import load_critic, load_policy


def write(tmp_path, tree, name="theirs.yaml"):
    path = tmp_path / name
    path.write_text(yaml.dump(tree))
    return path


def test_import_writes_settings_that_load_and_a_report(tmp_path, capsys):
    output = tmp_path / "ours.yaml"
    main(["import", str(write(tmp_path, RL_GAMES)), "--output", str(output)])
    assert "Mapped with a difference" in capsys.readouterr().err
    config = read_config(output).over(TrainConfig())
    assert config.algorithm.gamma == 0.98 and config.env.id == "Pendulum-v1"
    report = json.loads((tmp_path / "ours.report.json").read_text())
    assert report["dialect"].startswith("rl_games 1.6.5 (") and len(report["entries"]) > 30


def test_train_recognises_a_source_librarys_file(tmp_path, capsys):
    file = str(write(tmp_path, RL_GAMES))
    main(["train", "--config", file, "--run-dir", str(tmp_path / "runs"), "--console", "lines", "--seed", "5"])
    printed = capsys.readouterr()
    assert "ended by until.iterations" in printed.out and "rl_games" in printed.err
    assert "imported" in printed.out


def test_source_names_the_release_that_trained_with_the_file(tmp_path, capsys):
    file = str(write(tmp_path, RL_GAMES))
    for release, bootstraps in (("1.6.1", False), ("1.6.5", True), ("2.0", True)):
        output = tmp_path / f"{release}.yaml"
        main(["import", file, "--parity", "--source", f"rl_games-{release}", "--output", str(output)])
        assert f"rl_games {release} (as --source says" in capsys.readouterr().err
        ppo = read_config(output).over(TrainConfig()).algorithm
        assert ppo.bootstrap_truncated is bootstraps
        assert ppo.obs_statistics == ("minibatch" if bootstraps else "first_epoch")
    with pytest.raises(SystemExit):
        main(["import", file, "--source", "rl_games-1.7"])
    assert "rl_games-1.6.1, rl_games-1.6.5, rl_games-2.0" in capsys.readouterr().err


def test_rsl_rls_file_needs_an_environment(tmp_path, capsys):
    file = str(write(tmp_path, changed(RSL_RL, {"obs_groups": {}})))
    with pytest.raises(SystemExit):
        main(["train", "--config", file])
    assert f"canter train ENV --config {file}" in capsys.readouterr().err
    main(["train", "Pendulum-v1", "--config", file, "--num-envs", "4", "--dry-run"])
    assert "nothing was trained" in capsys.readouterr().out
    for env in ([], ["--env", "Pendulum-v1"]):
        main(["import", file, "--num-envs", "4", "--output", str(tmp_path / "ours.yaml"), *env])
        command = "canter train --config" if env else "canter train ENV --config"
        assert f"go on with: {command} {tmp_path / 'ours.yaml'}" in capsys.readouterr().err


def test_refusals_end_with_one_line_and_the_report(tmp_path, capsys):
    file = str(write(tmp_path, rl_games(config__gama=0.9)))
    with pytest.raises(SystemExit) as stopped:
        main(["import", file])
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert "Refused (1)" in printed and "did you mean gamma" in printed.splitlines()[-1]
    main(["import", file, "--without", "params.config.gama"])
    with pytest.raises(SystemExit):
        main(["import", file, "--set", "nonsense"])
    assert "expected KEY=VALUE" in capsys.readouterr().err


def test_a_run_exports_to_both_source_libraries_and_acts_alike(tmp_path, capsys):
    run = str(tmp_path / "run")
    small = ["--algorithm.model.policy.hidden", "[8]", "--algorithm.horizon", "16", "--until.iterations", "2"]
    free = [
        "--algorithm.model.bounds",
        "none",
        "--run-dir",
        str(tmp_path),
        "--name",
        "run",
        "--seed",
        "3",
        "--console",
        "quiet",
    ]
    main(["train", "Pendulum-v1", "--num-envs", "4", "--algorithm.num-minibatches", "2", *small, *free])
    obs = torch.randn(5, 3)
    values, _ = load_critic(run).value({"policy": obs}, ())
    theirs, others = str(tmp_path / "model_2.pt"), str(tmp_path / "nn" / "pendulum.pth")
    main(["export", run, "--policy", "final", "--output", theirs])
    main(["export", run, "--output", others])
    assert "iteration 2, in the layout of RSL-RL 5.x" in capsys.readouterr().out
    tree = read_pickled(theirs)
    for role, expected in (("actor", load_policy(f"{run}/policies/final_actor.safetensors")), ("critic", None)):
        found = tree[f"{role}_state_dict"]
        x = (obs - found["obs_normalizer._mean"]) / (found["obs_normalizer._std"] + 0.01)
        for i in (0, 2):
            x = torch.nn.functional.linear(x, found[f"mlp.{i}.weight"], found[f"mlp.{i}.bias"])
            x = torch.tanh(x) if i == 0 else x
        wanted = values if expected is None else expected.act({"policy": obs})[0]
        torch.testing.assert_close(x.reshape(wanted.shape), wanted, atol=1e-5, rtol=1e-5)
    assert tree["iter"] == 2 and "a2c_network.mu.weight" in read_pickled(others)["model"]
    with pytest.raises(SystemExit):
        main(["export", run, "--output", theirs])
    assert "already exists" in capsys.readouterr().err


def test_check_reads_the_file_of_another_library(tmp_path, capsys):
    main(["check", "--config", str(write(tmp_path, RL_GAMES)), "--parity"])
    printed = capsys.readouterr()
    assert "imported" in printed.out and "Ready to train" in printed.out
    assert "rl_games" in printed.err


def test_settings_without_an_environment_train_nothing_from_python():
    """They once trained CartPole-v1, the default of the settings."""
    imported = import_config(changed(RSL_RL, {"obs_groups": {}}), num_envs=4)
    assert not imported.names_env
    with pytest.raises(UserError, match=r"env\.id: the settings name no environment"):
        canter.train(config=imported.config, console="quiet", folder=False)
    assert canter.train("tensor:null", config=imported.config, console="quiet", folder=False, total_steps=96)


@pytest.mark.parametrize("flag", [["--parity"], ["--set", "a=1"], ["--agents", "2"]])
def test_flags_for_files_of_other_libraries_are_refused_without_one(flag, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check", "CartPole-v1", *flag])
    assert stopped.value.code == 2
    assert f"{flag[0]} is for a settings file of rl_games or RSL-RL: add --config FILE" in capsys.readouterr().err
