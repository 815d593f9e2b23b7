import subprocess
import sys

import pytest


def canter(*arguments):
    return subprocess.run([sys.executable, "-m", "canter", *arguments], capture_output=True, text=True, timeout=120)


def test_training_prints_progress_and_a_final_score():
    result = canter("train", "CartPole-v1", "--total-steps", "2000", "--seed", "1")
    assert result.returncode == 0, result.stderr
    assert "with its preset: 2,000 steps in 8 environments, seed 1" in result.stdout
    assert "explained variance" in result.stdout
    assert "Final score: mean return" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CartPol-v1"], "CartPole-v1"),
        (["tensor:cartpol"], "did you mean cartpole"),
        (["envpol:CartPole-v1"], "did you mean envpool"),
        (["CartPole-v1", "--num-envs", "0"], "num_envs=0 must be at least 1"),
        (["CartPole-v1", "--seed", "-1"], "seed=-1"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments, message):
    result = canter("train", *arguments, "--total-steps", "1000")
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
