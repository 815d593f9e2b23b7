"""Draw the diagrams of the rollout buffer and of one iteration: `python docs/pictures/diagrams.py`."""

from pathlib import Path

STATIC = Path(__file__).parents[1] / "_static"
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #1c2026 }
.mid { text-anchor: middle } .end { text-anchor: end } .muted { fill: #667080 } .title { font-weight: 650 }
.box { fill: #eef2f7; stroke: #b6c0cd } .strong { fill: #d5e6f3; stroke: #0072b2 } .line { stroke: #667080; fill: none }
.a { fill: #a9cfe6 } .b { fill: #d5e6f3 } .invalid { fill: #e4e7ec } .stop { fill: #d55e00 } .cut { fill: #e69f00 }
.sequence { stroke: #1c2026; stroke-dasharray: 3 3 } .tip { fill: #667080 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ee } .muted { fill: #9aa4b2 } .box { fill: #232a33; stroke: #4a5563 }
  .strong { fill: #16384f; stroke: #56b4e9 } .a { fill: #2b6d97 } .b { fill: #1d4763 } .invalid { fill: #333b45 }
  .sequence { stroke: #e6e9ee } .line { stroke: #9aa4b2 } .tip { fill: #9aa4b2 }
}
"""
CELL = 28


def text(x, y, words, kind=""):
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def arrow(*points):
    """Return a line along points with an arrow head at its end."""
    (x0, y0), (x, y) = points[-2:]
    path = " L".join(f"{a} {b}" for a, b in points)
    size, back = 5, ((-9, 0) if x > x0 else (9, 0)) if y == y0 else ((0, -9) if y > y0 else (0, 9))
    wide = (0, size) if y == y0 else (size, 0)
    base = [(x + back[0] + sign * wide[0], y + back[1] + sign * wide[1]) for sign in (1, -1)]
    tip = " ".join(f"{a},{b}" for a, b in [(x, y), *base])
    return f'<path d="M{path}" class="line"/><polygon points="{tip}" class="tip"/>'


def box(x, y, width, height, title, *lines, kind="box"):
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>']
    parts.append(text(x + width / 2, y + 20, title, "mid title"))
    parts += [text(x + width / 2, y + 38 + 17 * i, line, "mid muted") for i, line in enumerate(lines)]
    return "".join(parts)


def picture(name, about, width, height, *parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{about}">'
    (STATIC / name).write_text(f"{head}<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n")


def rollout():
    """Draw four environments with eight steps: T + 1 observations, T of everything else."""
    left, top, parts = 110, 56, []
    # For each environment, the steps at which episodes end, and how.
    worlds = [{2: "stop"}, {4: "cut"}, {4: "stop"}, {1: "stop", 6: "cut"}]
    for env, ends in enumerate(worlds):
        shade, y = "a", top + env * (CELL + 6)
        parts.append(text(left - 12, y + 19, f"environment {env}", "end muted"))
        for t in range(9):
            x = left + t * (CELL + 4)
            kind = "invalid" if env == 2 and 5 <= t <= 6 else shade
            stroke = ' stroke="#667080" stroke-dasharray="2 2"' if t == 8 else ""
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3" class="{kind}"{stroke}/>')
            if t in ends:
                parts.append(f'<rect x="{x + CELL - 5}" y="{y}" width="5" height="{CELL}" class="{ends[t]}"/>')
                shade = "b" if shade == "a" else "a"
    for t, label in [(0, "t = 0"), (4, "t = L"), (7, "T - 1"), (8, "T")]:
        parts.append(text(left + t * (CELL + 4) + CELL / 2, top - 8, label, "mid muted"))
    x, bottom = left + 4 * (CELL + 4) - 2, top + 4 * (CELL + 6)
    parts.append(f'<line x1="{x}" y1="{top - 3}" x2="{x}" y2="{bottom}" class="sequence"/>')
    legend = [("a", "one episode, and"), ("b", "the next one"), ("stop", "terminated: nothing follows")]
    legend += [
        ("cut", "truncated: the value of final_obs follows"),
        ("invalid", "invalid: in no loss and no statistic"),
    ]
    for i, (kind, words) in enumerate(legend):
        parts.append(f'<rect x="430" y="{top + 4 + 24 * i}" width="14" height="14" rx="2" class="{kind}"/>')
        parts.append(text(452, top + 16 + 24 * i, words))
    rows = [
        ("obs, reset", "[T + 1, N]: the last entry follows the last step"),
        ("reward, terminated, truncated, valid, duration, final_obs", "[T, N]"),
        ("record", "[T, N]: the algorithm's own data; for PPO raw actions and distribution parameters"),
        ("state", "[T / L, N]: the recurrent state at the start of each sequence of L steps (dashed line)"),
    ]
    for i, (name, words) in enumerate(rows):
        y = bottom + 30 + 22 * i
        parts.append(
            f'<text x="16" y="{y}"><tspan class="title">{name}</tspan> <tspan class="muted">{words}</tspan></text>'
        )
    title = text(
        16, 24, "The rollout buffer: T steps of N environments, at the same addresses in every iteration", "title"
    )
    picture("rollout.svg", "The rollout buffer", 720, bottom + 110, title, *parts)


def pipeline():
    """Draw one iteration, from observations to updated weights and back."""
    parts = [
        text(16, 24, "One iteration", "title"),
        box(16, 44, 150, 74, "Environments", "obs, reward,", "episode ends"),
        box(206, 44, 150, 74, "Collector", "act, step, write,", "T times"),
        box(396, 44, 130, 74, "Rollout", "[T, N] buffers", kind="strong"),
        arrow((166, 70), (206, 70)),
        arrow((206, 96), (166, 96)),
        text(186, 134, "actions", "mid muted"),
        arrow((356, 81), (396, 81)),
        box(566, 44, 138, 74, "Rewards", "shift, scale, squash,", "extensions"),
        arrow((526, 81), (566, 81)),
        box(566, 164, 138, 74, "Advantages", "values, advantages,", "returns"),
        arrow((635, 118), (635, 164)),
        box(
            206,
            164,
            320,
            92,
            "Phase: epochs x minibatches",
            "shuffled sequences",
            "engine: loss and gradients",
            kind="strong",
        ),
        text(366, 238, "clip, Adam, learning rates; stop at target_kl", "mid muted"),
        arrow((566, 201), (526, 201)),
        box(16, 164, 150, 74, "Statistics", "of observations, once,", "after the update"),
        arrow((206, 201), (166, 201)),
        arrow((91, 164), (91, 118)),
        arrow((366, 256), (366, 304)),
        box(186, 304, 360, 56, "Count, log, save", "the only place where the host waits"),
    ]
    picture("iteration.svg", "One iteration of training", 720, 376, *parts)


rollout()
pipeline()
