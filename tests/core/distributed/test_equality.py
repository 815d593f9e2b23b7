"""Ranks learn what one process learns that shuffles in as many blocks."""

from pathlib import Path

import pytest
import torch
from equality import CASES, ITERATIONS, RARE, run
from torchrun import torchrun

SCRIPT = str(Path(__file__).parent / "equality.py")
USUAL = [case for case in CASES if case not in RARE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder with runs of the usual cases by one process and by two ranks."""
    return made(tmp_path_factory.mktemp("equality"), USUAL, 2)


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory):
    """Return the folder with runs of all cases by one process, two and four ranks."""
    return made(tmp_path_factory.mktemp("equality"), CASES, 2, 4)


def made(folder, cases, *groups):
    before = torch.get_default_dtype()
    for case in cases:
        run(case, folder)
    torch.set_default_dtype(before)
    for ranks in groups:
        torchrun(ranks, SCRIPT, folder, *cases, "sac")
    return folder


@pytest.mark.parametrize("case", USUAL)
def test_two_ranks_learn_what_one_process_learns(case, runs):
    compare(runs, case, 2)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_learn_what_one_process_learns(case, ranks, long_runs):
    compare(long_runs, case, ranks)


def compare(folder, case, ranks):
    """Compare weights and rows of the log of one process and of several ranks."""
    one, many = (torch.load(folder / f"{case}-{count}.pt") for count in (1, ranks))
    # float64 but for observations and rewards, which a simulator may round to the other side.
    tolerance = 1e-5 if case != "native" else 1e-3
    for name, weight in one["weights"].items():
        torch.testing.assert_close(many["weights"][name], weight, rtol=tolerance, atol=tolerance)
    assert len(one["rows"]) == len(many["rows"])
    for rows in zip(one["rows"], many["rows"], strict=True):
        # The doctor looks at the environments of the first rank alone.
        mine, theirs = ({key: row[key] for key in row if not key.startswith("doctor/")} for row in rows)
        assert mine.keys() == theirs.keys()
        for key in [key for key in mine if key != "seconds" and not key.startswith("time/")]:
            expected = mine[key] if mine[key] is None else pytest.approx(mine[key], rel=10 * tolerance, abs=tolerance)
            assert theirs[key] == expected, key


def leaves(tree):
    return [tree] if isinstance(tree, torch.Tensor) else [x for part in tree.values() for x in leaves(part)]


def test_ranks_of_sac_have_the_same_weights_and_replays_of_their_own(runs):
    first, second = (torch.load(runs / f"sac-{rank}-of-2.pt", weights_only=True) for rank in range(2))
    assert first["counters"]["updates"] > 50
    mine, theirs = leaves(first["modules"]), leaves(second["modules"])
    assert len(mine) == len(theirs) > 10 and all(map(torch.equal, mine, theirs))
    seen = [leaves(each["replay"]["tables"]) for each in (first, second)]
    assert not all(map(torch.equal, *seen))


def test_the_cases_have_what_they_are_there_for(runs):
    rows = {case: torch.load(runs / f"{case}-1.pt")["rows"] for case in USUAL}
    assert rows["uneven"][-1]["env_steps"] < ITERATIONS * 32 * 8, "all rows are valid"
    assert rows["uneven"][-1]["minibatch_updates"] < ITERATIONS * 8, "no update stopped early"
    rates = [row["optim/learning_rate/model"] for row in rows["tensor"]]
    assert len(set(rates)) > 1, "the learning rate has not moved"
    assert rows["gymnasium"][-1]["episodes"] > 10
