import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from canter.app.cli import main


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs leave folders behind."""
    monkeypatch.chdir(tmp_path)


class Broken(gymnasium.Env):
    """Every reward is NaN."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), np.nan, False, False, {}


@pytest.fixture
def broken():
    gymnasium.register("Broken-v0", Broken, disable_env_checker=True)
    yield "Broken-v0"
    del gymnasium.registry["Broken-v0"]


def test_check_reports_everything_and_trains_nothing(capsys, tmp_path):
    main(["check", "CartPole-v1", "--num-envs", "10", "--algorithm.horizon", "32", "--algorithm.epochs", "4"])
    out = capsys.readouterr().out
    assert out.startswith("CartPole-v1 with its preset\n")
    assert "batch = 32 steps x 10 envs = 320, 4 minibatches of 80, 4 epochs: 16 updates per rollout" in out
    for subject in ("observations", "actions", "autoreset", "episodes", "rewards", "seeds", "foresight", "memory"):
        assert f"\nok       {subject}" in out
    assert out.endswith("Ready to train: 0 errors, 0 warnings, 0 notes\n")
    assert list(tmp_path.iterdir()) == []


def test_check_ends_with_code_1_where_something_cannot_work(capsys, broken):
    with pytest.raises(SystemExit) as leaving:
        main(["check", broken, "--algorithm.num-minibatches", "7"])
    assert leaving.value.code == 1
    out = capsys.readouterr().out
    assert "error    rewards       environment 0 returned reward = nan after 1 random step\n" in out
    assert "error    settings      num_minibatches=7 does not divide" in out
    assert "This cannot work: 2 errors, " in out


def test_check_takes_the_flags_of_train_and_explains_bad_ones(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["check", "CartPole-v1", "--algorithm.gama", "1"])
    assert leaving.value.code == 2
    assert "did you mean --algorithm.gamma" in capsys.readouterr().err
    main(["check", "--preset", "Pendulum", "--algorithm.gamma", "0.5"])
    assert "gamma 0.5 looks about 2 steps ahead" in capsys.readouterr().out


def test_a_run_that_cannot_work_ends_before_it_leaves_anything(capsys, tmp_path, broken):
    with pytest.raises(SystemExit) as leaving:
        main(["train", broken, "--total-steps", "1000"])
    assert leaving.value.code == 2
    assert "environment 0 returned reward = nan" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_starts_with_its_arithmetic_and_its_warnings(capsys):
    main(["train", "CartPole-v1", "--total-steps", "1024", "--console", "quiet"])
    out = capsys.readouterr().out
    assert "batch = 128 steps x 8 envs = 1,024, 4 minibatches of 256" in out
    assert "\nwarning  budget        only 1 rollout in the whole run" in out
    assert "\nok " not in out
