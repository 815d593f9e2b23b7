"""`canter eval --average`: tasks that never end."""

import json

import pytest

from canter.app.cli import main


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    """A run of a task that never ends."""
    runs = tmp_path_factory.mktemp("queue")
    flags = ["--env.num-envs", "4", "--algorithm.horizon", "64", "--total-steps", "256", "--console", "quiet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canter.app.experiments.scores.EVAL_STEPS", 100)
        patch.setattr("canter.app.experiments.scores.AVERAGE_STEPS", 100)
        main(["train", "tensor:queue", "--preset", "queue-average-reward", *flags, "--run-dir", str(runs)])
    return str(next(runs.glob("tensor-queue*")))


def test_a_long_run_average_is_printed_with_its_interval(queue, capsys):
    main(["eval", queue, "--average", "80", "--json"])
    result = json.loads(capsys.readouterr().out)
    low, high = result["confidence_interval_95"]
    assert (result["steps"], result["warm_up"]) == (80, 8)
    assert low < result["long_run_average"] < high
    assert result["long_run_average"] < 0  # a reward that is a holding cost
    main(["eval", queue, "--average", "80"])
    assert f"long-run average of the reward per unit of time: {result['long_run_average']:.4g} (95 %" in (
        capsys.readouterr().out
    )


def test_too_few_steps_are_refused(queue, capsys):
    with pytest.raises(SystemExit) as error:
        main(["eval", queue, "--average", "3"])
    assert error.value.code == 2
    assert "steps=3 must be at least" in capsys.readouterr().err
