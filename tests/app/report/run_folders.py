"""Run folders as training leaves them, made by hand."""

import json

import yaml

from canter.config import TrainConfig
from canter.core.plain import to_plain


def make_run(parent, name, *, seed=0, env_id="CartPole-v1", rows=(), record=None, **algorithm):
    """A folder with settings, a record and rows; `algorithm` changes settings of that section."""
    path = parent / name
    path.mkdir(parents=True)
    settings = to_plain(TrainConfig(seed=seed))
    settings["env"]["id"] = env_id
    settings["algorithm"] |= algorithm
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    if record is not None:
        (path / "run.json").write_text(json.dumps(record))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(iteration, return_, **more):
    """One iteration of 100 steps and 2 seconds."""
    counted = {"iteration": iteration, "env_steps": 100 * iteration, "seconds": 2.0 * iteration, "return": return_}
    return counted | more


def rising(*returns, **more):
    """Rows whose returns are these, with further metrics that grow with them; what never changes is not drawn."""
    return [
        row(number, return_, **{name: value * (1 + number / 100) for name, value in more.items()})
        for number, return_ in enumerate(returns, 1)
    ]
