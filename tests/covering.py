"""Selections of parameters: `make test` runs the usual ones, `make test-all` all of them."""

from functools import reduce
from itertools import combinations, product
from operator import or_

import pytest


def usual_of(values, usual):
    """Return all values as parameters, those that are not usual marked long."""
    missing = set(usual) - set(values)
    assert not missing, f"not among the values: {missing}"
    return [value if value in usual else pytest.param(*several(value), marks=pytest.mark.long) for value in values]


def several(value):
    """Return the values of several parameters, which stand in a tuple, or those of one."""
    return value if isinstance(value, tuple) else (value,)


def pairwise(*axes):
    """Return the full product as parameters; those that a covering array of all pairs does not need are marked long."""
    rows = list(product(*axes))
    needed = covering_array(rows)
    return [pytest.param(*row, marks=[] if row in needed else pytest.mark.long) for row in rows]


def covering_array(rows):
    """Return a few of the rows, in which any two values that stand together in some row still do."""
    bits = {}
    covered = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(row)) for row in rows]
    missing = reduce(or_, covered)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda row: (covered[row] & missing).bit_count())
        chosen.append(rows[best])
        missing &= ~covered[best]
    return chosen


def pairs(row):
    """Return all pairs of a row's values, with their places."""
    return combinations(enumerate(row), 2)
