"""Ranks learn what one process learns that shuffles in as many blocks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from equality import CASES
from torchrun import torchrun

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the runs of all cases by one process are."""
    folder = tmp_path_factory.mktemp("equality")
    subprocess.run([sys.executable, str(HERE / "equality.py"), str(folder)], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def ranks(request, runs):
    """How many ranks have run all cases too."""
    torchrun(request.param, HERE / "equality.py", runs)
    return request.param


@pytest.mark.parametrize("case", CASES)
def test_ranks_learn_what_one_process_learns(case, runs, ranks):
    one, many = (torch.load(runs / f"{case}-{count}.pt") for count in (1, ranks))
    # float64 but for observations and rewards, which a simulator may round to the other side.
    tolerance = 1e-5 if case != "native" else 1e-3
    for name, weight in one["weights"].items():
        torch.testing.assert_close(many["weights"][name], weight, rtol=tolerance, atol=tolerance)
    assert len(one["rows"]) == len(many["rows"])
    for mine, theirs in zip(one["rows"], many["rows"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in [key for key in mine if key != "seconds" and not key.startswith("time/")]:
            expected = mine[key] if mine[key] is None else pytest.approx(mine[key], rel=10 * tolerance, abs=tolerance)
            assert theirs[key] == expected, key


def test_the_cases_have_what_they_are_there_for(runs):
    rows = {case: torch.load(runs / f"{case}-1.pt")["rows"] for case in CASES}
    assert rows["uneven"][-1]["env_steps"] < 10 * 32 * 8, "all rows are valid"
    assert rows["uneven"][-1]["minibatch_updates"] < 10 * 8, "no update stopped early"
    rates = [row["optim/learning_rate/model"] for row in rows["tensor"]]
    assert len(set(rates)) > 1, "the learning rate has not moved"
    assert rows["gymnasium"][-1]["episodes"] > 10
