"""Hold the pages of the algorithms: every metric that a run logs is explained, and the table of features is true."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import canter
from canter.algorithms.base import algorithms
from canter.algorithms.extension import extensions
from canter.algorithms.ppo import CentralValueConfig
from canter.app.experiments.population import population_config
from canter.config.presets import presets
from canter.core.plain import from_plain
from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK, Continuous, Discrete, EnvSpec, MultiDiscrete, TensorSpec
from canter.engines.base import BoundLossConfig
from canter.envs import EnvConfig
from canter.nn.policy_file import save_policy

DOCS = Path(__file__).parents[2] / "docs"


def explained_on(page):
    """Return the names in the first column of the table of metrics."""
    table = page.read_text().partition("| metric | meaning |\n")[2].partition("\n\n")[0]
    return {name for row in table.splitlines() for name in re.findall(r"`([\w/]+)`", row.split(" | ")[0])}


def in_every_run():
    """Return the names and beginnings of names that the page on run folders explains."""
    text = (DOCS / "run_folder.md").read_text().partition("\n## metrics.jsonl\n")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([\w/]+)(?:\.\.\.)?`", cell)}


def logged_by(config, iterations=3):
    """Return the names that a run logs and that are not explained for all runs."""
    rows = []
    with canter.Trainer(config, lambda report: rows.append(report.row())) as trainer:
        trainer.learn(iterations)
    common = in_every_run()
    names = set().union(*rows)
    return {name for name in names if name not in common and not name.startswith(("env/", "self_play/", "doctor/"))}


def ppo(env="tensor:quadrotor", **settings):
    algorithm = canter.PPOConfig(horizon=16, num_minibatches=2, epochs=1, **settings)
    return canter.TrainConfig(env=EnvConfig(id=env, num_envs=8), algorithm=algorithm, total_steps=10_000)


def small(name, **settings):
    preset = presets[name]
    return replace(preset, algorithm=replace(preset.algorithm, **settings))


def sac(**settings):
    return small("Pendulum-sac", warmup_steps=8, horizon=4, **settings)


def distillation(tmp_path, env):
    teacher = tmp_path / f"{env.replace(':', '-')}.safetensors"
    with canter.Trainer(ppo(env)) as trainer:
        save_policy(teacher, trainer.algorithm.policy)
    settings = {"kind": "distillation", "teacher": str(teacher), "horizon": 16}
    return from_plain({"algorithm": settings}, ppo(env))


@pytest.fixture
def runs_of(tmp_path):
    """Return a function from the name of a page to runs that together log all its metrics."""

    def runs(page):
        if page == "ppo":
            yield ppo(bound_loss=BoundLossConfig())
            yield ppo("tensor:queue", objective="average")
            yield ppo(critic_optimizer=canter.OptimizerConfig())
            yield ppo(central_value=CentralValueConfig())
        elif page == "population":
            yield population_config(ppo(), 2)
        elif page == "sac":
            yield sac(scale_rewards=True)
        elif page == "distillation":
            yield distillation(tmp_path, "tensor:cartpole")
            yield distillation(tmp_path, "tensor:quadrotor")
        elif page == "rnd":
            yield small("tensor:maze", horizon=16, epochs=1)
        elif page == "symmetry":
            yield small("quadrotor-symmetry", horizon=16, epochs=1)
        else:
            yield presets["swimmer-narrow"]

    return runs


PAGES = ("amp", "distillation", "population", "ppo", "rnd", "sac", "symmetry")


def test_every_algorithm_and_extension_has_a_page():
    assert {path.stem for path in (DOCS / "algorithms").glob("*.md")} == {"index", *PAGES}
    assert {"rnd", "symmetry", "amp", *algorithms} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_is_explained(page, runs_of):
    logged = set().union(*map(logged_by, runs_of(page)))
    explained = explained_on(DOCS / "algorithms" / f"{page}.md")
    if page in extensions or page == "population":
        logged -= explained_on(DOCS / "algorithms" / "ppo.md")
    assert logged == explained


BOX = Continuous(low=(-1.0,), high=(1.0,))
VECTOR = TensorSpec((3,))
RNN = {"rnn": {"cell": "gru", "hidden": 8}}
FEATURES = {
    "continuous actions with bounds": (BOX, {}, {}),
    "continuous actions without bounds": (Continuous(low=(-math.inf,), high=(math.inf,)), {}, {}),
    "discrete actions": (Discrete(2), {}, {}),
    "several discrete actions": (MultiDiscrete((2, 3)), {}, {}),
    "action masks": (Discrete(2), {ACTION_MASK: TensorSpec((2,), torch.bool)}, {}),
    "images": (BOX, {"policy": TensorSpec((3, 36, 36), torch.uint8)}, {}),
    "recurrent policy": (BOX, {}, {"ppo": {"model": {"policy": RNN}}, "": {"policy": RNN}}),
    "critic with other observations": (
        BOX,
        {"more": VECTOR},
        {"ppo": {"model": {"critic": {"obs_groups": ["more"]}}}, "": {"critic": {"obs_groups": ["more"]}}},
    ),
    "average reward": (BOX, {}, {"": {"objective": "average"}}),
    "reward transforms": (BOX, {}, {"": {"reward": {"scale": 0.1}}}),
    "mean of the weights (`policy_average`)": (BOX, {}, {"": {"policy_average": 0.9}}),
    "extensions": (BOX, {}, {"": {"extensions": [{"kind": "rnd"}]}}),
}
"""Actions, further observations, and settings by algorithm ("" for all others) of each row of the table."""


def table_of_features():
    """Return the cells of the table by row and algorithm."""
    rows = (
        (DOCS / "algorithms" / "index.md").read_text().partition("| | PPO |")[2].partition("\n\n")[0].splitlines()[2:]
    )
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: dict(zip(("ppo", "sac", "distillation"), row[1:], strict=True)) for row in cells}


def supports(kind, feature, folder):
    """Return True if an algorithm can be built with a feature, and acts."""
    action, obs, settings = FEATURES[feature]
    spec = EnvSpec(obs={"policy": VECTOR, **obs}, action=action, num_envs=8, env_id="test")
    chosen = {"kind": kind, "horizon": 16, **settings.get(kind, settings.get("", {}))}
    if kind == "sac":
        chosen["replay"] = {"capacity": 10_000}
    if kind == "distillation":
        teacher = folder / "teacher.safetensors"
        save_policy(teacher, canter.PPOConfig().build(spec, 0).policy)
        chosen["teacher"] = str(teacher)
    try:
        algorithm = from_plain({"algorithm": chosen}, canter.TrainConfig()).algorithm.build(spec, 0)
    except UserError:
        return False
    zeros = {name: torch.ones(8, *group.shape).to(group.dtype) for name, group in spec.obs.items()}
    action, *_ = algorithm.policy.act(zeros, algorithm.policy.initial_state(8))
    assert len(action) == 8
    return True


@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_of_features_is_true(feature, tmp_path):
    row = table_of_features()[feature]
    assert row == {kind: "yes" if supports(kind, feature, tmp_path) else "no" for kind in row}


def test_the_table_has_these_rows():
    assert table_of_features().keys() == FEATURES.keys()
