"""Perform the additions that docs/architecture.md describes, in the files that it names, in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from code_lines import SOURCE

DOCS = Path(__file__).parents[2] / "docs"
HOW_TO_ADD = (DOCS / "architecture.md").read_text().partition("\n## How to add\n")[2].partition("\n## ")[0]
NEW_FILE = ""
"""Anchor for text that becomes a new file."""

CORRIDOR = '''\
"""Walk to the right end of a corridor."""

import torch

from canter.core.specs import Discrete, TensorSpec
from canter.envs.tensor.base import Outcome, TensorEnv


class Corridor(TensorEnv):
    """Reward 1 for reaching position 1; action 1 goes right, 0 left."""

    def __init__(self, num_envs, device="cpu", *, max_episode_steps=20, random_start=False):
        obs = {"policy": TensorSpec((1,))}
        super().__init__("tensor:corridor", num_envs, device, obs, Discrete(2), max_episode_steps, random_start)

    def _sample_state(self):
        return {"position": self._uniform(0.0, 0.1)}

    def _advance(self, state, action):
        position = state["position"] + 0.2 * (2.0 * action - 1.0)
        arrived = position >= 1.0
        return Outcome({"position": position}, arrived.float(), arrived)

    def _observe(self, state):
        return {"policy": state["position"][:, None]}
'''


def random_search():
    """Return the algorithm of docs/extending.md as a module of the package."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "extending.md").read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if '"random_search")' in block]
    imports = (
        "from canter.algorithms.base import Algorithm, algorithms\nfrom canter.nn.actor_critic import ModelConfig\n"
    )
    code = code.replace("import canter\n", imports).replace("@canter.register(", "@algorithms.register(")
    return code.replace('"algorithm", ', "").replace("canter.Algorithm", "Algorithm").replace("canter.Model", "Model")


ADDITIONS = {
    "A loss term": [
        (
            "functional/losses.py",
            "SURROGATES: dict",
            "def squared_params(params: Tensor) -> Tensor:\n"
            '    """Return the mean square of distribution parameters `[..., P]`."""\n'
            "    return params.square().mean(-1)\n\n\n"
            "SURROGATES: dict",
        ),
        (
            "engines/base.py",
            "    bound: BoundLoss | None = None\n",
            "    bound: BoundLoss | None = None\n    params_coef: float | None = None\n",
        ),
        ("engines/autograd.py", "import SURROGATES, VALUE_LOSSES", "import SURROGATES, VALUE_LOSSES, squared_params"),
        (
            "engines/autograd.py",
            '        if loss.bound is not None:\n            terms.append(Term("loss/bound"',
            "        if loss.params_coef is not None and output.dist_params is not None:\n"
            "            value = squared_params(output.dist_params)\n"
            '            terms.append(Term("loss/params", value, weight=loss.params_coef))\n'
            '        if loss.bound is not None:\n            terms.append(Term("loss/bound"',
        ),
        (
            "algorithms/ppo/config.py",
            "    bound_loss: BoundLossConfig | None = None\n",
            '    params_coef: float | None = None\n    """Weight of the squared distribution parameters."""\n'
            "    bound_loss: BoundLossConfig | None = None\n",
        ),
        (
            "algorithms/ppo/config.py",
            "        return PPOLoss(\n",
            "        return PPOLoss(\n            params_coef=self.params_coef,\n",
        ),
    ],
    "An activation": [
        ("nn/mlp.py", '    "identity": nn.Identity,\n', '    "identity": nn.Identity,\n    "softsign": nn.Softsign,\n'),
    ],
    "A tensor environment": [
        ("envs/tensor/corridor.py", NEW_FILE, CORRIDOR),
        (
            "envs/tensor/__init__.py",
            "from canter.envs.tensor.classic",
            "from canter.envs.tensor.corridor import Corridor\nfrom canter.envs.tensor.classic",
        ),
        (
            "envs/tensor/__init__.py",
            'tensor_envs.register("cartpole")',
            'tensor_envs.register("corridor")(Corridor)\ntensor_envs.register("cartpole")',
        ),
    ],
    "An algorithm": [
        ("algorithms/random_search.py", NEW_FILE, random_search()),
        (
            "config/__init__.py",
            "from canter.algorithms import sac as sac",
            "from canter.algorithms import random_search as random_search\nfrom canter.algorithms import sac as sac",
        ),
    ],
}

USE = """
import canter

network = canter.NetworkConfig(hidden=(8,), activation="softsign")
algorithm = canter.PPOConfig(horizon=16, num_minibatches=2, params_coef=0.5, model=canter.ModelConfig(policy=network))
config = canter.TrainConfig(env=canter.EnvConfig(id="tensor:corridor"), total_steps=4096, algorithm=algorithm)
with canter.Trainer(config, lambda report: print("loss", report.metrics["loss/params"], report.return_)) as trainer:
    print("engine", trainer.learn().about()["engine"])
settings = {"kind": "random_search", "horizon": 20}
canter.train("tensor:corridor", algorithm=settings, total_steps=2048, console="quiet", folder=False)
"""


@pytest.mark.parametrize("title", ADDITIONS)
def test_the_page_names_the_files_of_an_addition(title):
    paragraph = re.search(rf"^\*\*{title}\.?\*\*(.*?)(?=^\*\*|\Z)", HOW_TO_ADD, re.MULTILINE | re.DOTALL)
    assert paragraph, f"no paragraph **{title}**"
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", paragraph[1]))
    assert named == {path for path, _, _ in ADDITIONS[title]}


def test_additions_in_these_files_are_enough(tmp_path):
    package = tmp_path / "canter"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for edits in ADDITIONS.values():
        for path, anchor, text in edits:
            if anchor == NEW_FILE:
                (package / path).write_text(text)
                continue
            before = (package / path).read_text()
            assert before.count(anchor) == 1, f"{path}: {anchor!r}"
            (package / path).write_text(before.replace(anchor, text))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", USE], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert len(losses) == 32 and all(loss > 0 for loss in losses)
    engine = next(line for line in done.stdout.splitlines() if line.startswith("engine "))
    assert engine.startswith("engine autograd") and "params_coef" in engine, "the fast engine must refuse what is new"
