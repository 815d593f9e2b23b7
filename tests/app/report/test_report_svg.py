import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from canter.app.console.text import format_duration
from canter.app.report.drawing import (
    MAX_POINTS,
    Frame,
    Line,
    Markup,
    downsample,
    element,
    escape,
    format_si,
    join,
    legend,
    line_chart,
    stacked_bar,
    tick_texts,
    ticks,
)

X = np.arange(0.0, 101.0)


def drawn(*lines, **frame):
    """A chart as a tree."""
    return ET.fromstring(line_chart(lines, Frame("Return", 400, 200, **frame)))


def path_of(tree, kind):
    """Places of the first path of a kind."""
    found = next(node for node in tree.iter("path") if kind in node.get("class").split())
    return [tuple(map(float, place.split(","))) for place in re.findall(r"[-\d.]+,[-\d.]+", found.get("d"))]


def test_lines_lie_where_their_numbers_are():
    tree = drawn(Line("a", X + 900, X * 2))
    places = path_of(tree, "line")
    assert len(places) == 101
    xs, ys = zip(*places, strict=True)
    assert list(xs) == sorted(xs) and list(ys) == sorted(ys, reverse=True)
    # The axes are linear: the middle lies in the middle.
    assert places[50] == pytest.approx(((xs[0] + xs[-1]) / 2, (ys[0] + ys[-1]) / 2), abs=0.11)
    # The label of 100 on the y axis, the only one of its text, is at the height of the middle.
    labels = {node.text: float(node.get("y")) for node in tree.iter("text") if node.get("y")}
    assert labels["100"] - 4 == pytest.approx(places[50][1], abs=0.2)


def test_a_band_goes_there_and_back():
    tree = drawn(Line("a", X, X, low=X - 1, high=X + 1))
    there_and_back = path_of(tree, "band")
    assert len(there_and_back) == 202
    assert there_and_back[0][0] == there_and_back[-1][0]
    assert there_and_back[0][1] < path_of(tree, "line")[0][1] < there_and_back[-1][1]


def test_charts_say_what_they_show_to_those_who_cannot_see():
    tree = drawn(Line("a", X, X), Line("b", X, -X, color=1), x_label="env steps")
    assert tree.get("role") == "img"
    assert tree.get("aria-label") == "Return over env steps: a from 0 to 100; b from 0 to \u2212100"


def test_pointing_shows_the_values_there():
    tree = drawn(Line("a", X, X * 2), Line("b", X[:51], X[:51] * 3, color=1), readouts=5)
    reads = [node for node in tree.iter("g") if node.get("class") == "read"]
    texts = [[span.text for span in read.iter("tspan")] for read in reads]
    assert texts[1] == ["25 env steps", "a 50", "b 75"]
    assert texts[4] == ["100 env steps", "200"]  # where the other has ended, one needs no name


def test_odd_series_do_not_break_a_chart():
    assert line_chart([], Frame("x", 400, 200)) == ""
    assert line_chart([Line("a", np.array([]), np.array([]))], Frame("x", 400, 200)) == ""
    assert next(drawn(Line("a", np.array([5.0]), np.array([2.0]))).iter("circle")) is not None
    for y in (np.zeros(101), np.full(101, 1e-12), np.full(101, -3e15), np.where(X == 50, 1e12, 0.0)):
        places = path_of(drawn(Line("a", X, y)), "line")
        assert all(math.isfinite(x) and -2000 < y < 2000 for x, y in places)


def test_below_the_floor_nothing_moves_the_axis():
    tree = drawn(Line("a", X, np.where(X == 3, -1e6, 0.5)), floor=-1.0)
    labels = [node.text for node in tree.iter("text") if node.get("class") == "end"]
    assert "\u22121.0" in labels and "0.5" in labels


def test_long_lines_are_drawn_by_their_means():
    x = np.arange(10_001.0)
    line = downsample(Line("a", x, 2 * x, low=x, high=3 * x))
    assert len(line.x) <= MAX_POINTS
    assert line.y == pytest.approx(2 * line.x)
    assert line.low == pytest.approx(line.x) and line.high == pytest.approx(3 * line.x)
    assert (line.x[-1], line.y[-1]) == (10_000, 20_000)


def test_a_threshold_is_marked():
    tree = drawn(Line("a", X, X), threshold=475.0)
    mark = next(node for node in tree.iter("g") if node.get("class") == "threshold")
    assert mark.find("text").text == "475"
    assert 0 < float(mark.find("line").get("y1")) < 200


def test_a_stacked_bar_has_the_right_shares():
    tree = ET.fromstring(stacked_bar([("env", 1.0), ("update", 3.0)], 400))
    widths = [float(node.get("width")) for node in tree.iter("rect")]
    assert widths == [99, 299]  # less a hairline each
    assert [node.text for node in tree.iter("text")] == ["25%", "75%"]
    assert tree.get("aria-label") == "Shares: env 25%, update 75%"
    assert stacked_bar([], 400) == ""


def test_a_legend_names_what_is_not_faint():
    assert legend([Line("a", X, X)]) == ""
    assert re.findall(r"</i>(\w+)", legend([Line("a", X, X), Line("b", X, X, 1), Line("c", X, X, faint=True)])) == [
        "a",
        "b",
    ]


def test_everything_is_escaped_that_is_no_markup():
    evil = '<script>"&\x00\ud800'
    assert escape(evil) == "&lt;script&gt;&quot;&amp;\ufffd?"
    assert element("b", evil, Markup("<i></i>"), title=evil) == (
        '<b title="&lt;script&gt;&quot;&amp;\ufffd?">&lt;script&gt;&quot;&amp;\ufffd?<i></i></b>'
    )
    assert (
        element("line", x1=1.04, stroke_width=2.0, class_="a", id=None) == '<line x1="1" stroke-width="2" class="a"/>'
    )
    assert join(["<", None, Markup("<br/>")]) == "&lt;<br/>"


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 1e5, "0,20k,40k,60k,80k,100k"),
        (0, 500, "0,100,200,300,400,500"),
        (-1500, -100, "\u22121500,\u22121000,\u2212500"),
        (0, 0.03, "0,0.01,0.02,0.03"),
        (0, 0.00012, "0,5e-5,1e-4"),
        (0, 1.2e6, "0,0.5M,1.0M"),
        (1e6, 1e6 + 3, "1000000,1000001,1000002,1000003"),
        (5, 5, "5"),
    ],
)
def test_ticks_are_round_numbers_in_one_unit(low, high, texts):
    plain = [text.replace("\u202f", "").replace(",", "") for text in tick_texts(ticks(low, high, 5))]
    assert ",".join(plain) == texts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (math.nan, "\u2013"),
        (0, "0"),
        (-3.25, "\u22123.25"),
        (487.31, "487.3"),
        (1024, "1,024"),
        (100_352, "100.4\u202fk"),
        (3.2e6, "3.2\u202fM"),
        (0.00012, "1.20e-4"),
    ],
)
def test_numbers_are_short(value, text):
    assert format_si(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\u2013"),
        (0.42, "0.4 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (185, "3 min 5 s"),
        (3599.7, "1 h"),
        (7800, "2 h 10 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_times_have_two_units_at_most(seconds, text):
    assert format_duration(seconds) == text
