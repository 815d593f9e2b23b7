"""`canter.network`: any torch module as a network, trained, saved and loaded."""

import sys
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import canter
from canter.core.registry import UserError
from canter.core.specs import TensorSpec
from canter.envs import imports

SHORT: dict[str, Any] = {"num_envs": 2, "total_steps": 64, "console": "quiet", "final_evaluation": False}
STEPS: dict[str, Any] = {"horizon": 8, "epochs": 1, "num_minibatches": 2}


class Plain(nn.Module):
    def __init__(self, inputs, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ELU())

    def forward(self, x):
        return self.layers(x)


class Lazy(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layer = nn.LazyLinear(width)

    def forward(self, x):
        return self.layer(x)


class Pictures(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.layers(x)


def wrong(value) -> Any:
    """Return a value of a type that is refused."""
    return value


def build(config, **shapes) -> Any:
    obs = {name: TensorSpec(shape) for name, shape in (shapes or {"policy": (3,)}).items()}
    return config.build(obs, "policy")


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (canter.network(Plain), 16),
        (canter.network(Plain, width=5), 5),
        (canter.network(Lazy), 8),
        (canter.network(lambda inputs: nn.Linear(inputs, 7)), 7),
    ],
)
def test_features_are_those_of_the_module(config, features):
    network = build(config)
    assert network.features == features
    output, state = network({"policy": torch.randn(4, 2, 3)}, (), None)
    assert output.shape == (4, 2, features)
    assert state == network.initial_state(2) == ()


def test_groups_are_normalised_and_concatenated():
    network = build(canter.network(Plain, obs_groups=("a", "b")), a=(3,), b=(2, 2), c=(9,))
    obs = {"a": 5 + torch.randn(50, 2, 3), "b": torch.randn(50, 2, 2, 2)}
    network.update_statistics(obs, torch.ones(50, 2, dtype=torch.bool))
    assert network.groups == ("a", "b")
    assert network.module.layers[0].in_features == 7
    assert network(obs, (), None)[0].shape == (50, 2, 16)
    assert network.normalizers[0](obs["a"]).mean().abs() < 1e-4


def test_an_image_keeps_its_shape_and_statistics_do_not_change_while_it_is_built():
    network = build(canter.network(Pictures), pixels=(3, 8, 8))
    assert network.features == 4
    assert network.module.training
    assert network.module.layers[1].num_batches_tracked == 0
    pixels = torch.randint(0, 255, (1, 2, 3, 8, 8), dtype=torch.uint8)
    assert network({"pixels": pixels}, (), None)[0].shape == (1, 2, 4)


def test_it_trains_is_saved_and_loaded(tmp_path):
    model = canter.ModelConfig(policy=canter.network(Plain, width=12), critic=canter.network(Lazy))
    algorithm = canter.PPOConfig(model=model, **STEPS)
    result = canter.train("CartPole-v1", algorithm=algorithm, run_dir=tmp_path, name="a", **SHORT)
    network: Any = result.algorithm.policy.actor.network
    assert network.module.layers[0].out_features == 12
    policy = canter.load(tmp_path / "a")
    obs = np.zeros(4, np.float32)
    assert policy.predict(obs)[0] == result.predict(obs)[0]


def test_a_module_of_the_user_is_imported_again_if_it_is_allowed(tmp_path, monkeypatch):
    source = """
        from torch import nn

        def make(inputs, width):
            return nn.Linear(inputs, width)
    """
    (tmp_path / "my_networks.py").write_text(dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "_allowed", {})
    config = canter.ModuleConfig(module="my_networks:make", arguments={"width": 6})
    with pytest.raises(UserError, match="add --allow-import my_networks"):
        build(config)
    canter.allow_import("my_networks", str(tmp_path))
    assert build(config).features == 6
    with pytest.raises(UserError, match="my_networks has no other"):
        build(canter.ModuleConfig(module="my_networks:other"))
    del sys.modules["my_networks"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: canter.network(nn.Linear(3, 4)), "Linear(...) is one module; pass its class"),
        (lambda: canter.network(wrong("Plain")), "'Plain' is no class or function"),
        (lambda: build(canter.network(wrong(lambda inputs: "text"))), "returned str, expected a torch.nn.Module"),
        (lambda: build(canter.network(lambda: nn.Linear(5, 4))), "it fails with observations [2, 3]"),
        (
            lambda: build(canter.network(lambda inputs: nn.Flatten(0))),
            "returned [6] for observations [2, 3], expected",
        ),
        (lambda: build(canter.network(Plain, depth=2)), "unexpected keyword argument 'depth'"),
        (lambda: build(canter.ModuleConfig(module="python:gone")), "existed only in the program that trained it"),
        (lambda: build(canter.ModuleConfig(module="os")), "expected my_module:MyModule"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(UserError) as raised:
        make()
    assert message in str(raised.value)


def test_a_policy_with_a_module_is_exported(tmp_path):
    model = canter.ModelConfig(policy=canter.network(Plain))
    spec = canter.EnvConfig(id="CartPole-v1", num_envs=1).build("cpu").spec
    policy = model.build_policy(spec)
    exported = canter.export_policy(policy, tmp_path / "policy.pt2", "torch", {"policy": torch.randn(3, 4)})
    assert exported
    assert (tmp_path / "policy.pt2").exists()
