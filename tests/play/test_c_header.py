"""C headers and NumPy files of policies: every head and bound, compared with the policy."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_export import BOX, CASES, VECTOR, Noise, network, trained

import canter.runtime
from canter.core.interface import Interface, Joint, Signal
from canter.core.specs import ACTION_MASK, Continuous, Discrete, MultiDiscrete, TensorSpec
from canter.nn.actor_critic import DISTRIBUTIONS_FOR, ModelConfig
from canter.nn.distributions import BOUNDS, DiagGaussian
from canter.nn.heads import StdConfig
from canter.nn.mlp import activations
from canter.nn.network import ModuleConfig, NetworkConfig
from canter.nn.normalizer import NormalizerConfig
from canter.nn.rnn import RNNConfig
from canter.play.c_library import FLAGS, load_header
from canter.play.contract import read_contract
from canter.play.export import ExportError, collect_inputs, export_policy
from canter.play.program import make_program
from covering import usual_of

MASK = {ACTION_MASK: TensorSpec((5,), torch.bool)}
DEEP = RNNConfig(cell="gru", hidden=9, layers=2, position="after_mlp", layer_norm=True, concat_input=True)
EXPORTABLE = {
    **{name: case for name, case in CASES.items() if name != "image"},
    "gaussian-inf": (ModelConfig(), VECTOR, Continuous((-1.0, -np.inf, 0.0), (1.0, np.inf, np.inf))),
    "std-network": (ModelConfig(std=StdConfig(kind="network")), VECTOR, BOX),
    "std-network-tanh": (ModelConfig(distribution="tanh_gaussian", std=StdConfig(kind="network")), VECTOR, BOX),
    "action-range": (ModelConfig(distribution="beta", action_range=(-2.0, 1.0)), VECTOR, BOX),
    "no-hidden": (ModelConfig(policy=NetworkConfig(hidden=())), VECTOR, BOX),
    "wide": (ModelConfig(policy=NetworkConfig(hidden=(70, 33), normalizer=NormalizerConfig(clip=None))), VECTOR, BOX),
    "no-normalizer": (network(normalize_obs=False), {"policy": TensorSpec((2, 3))}, Discrete(3)),
    "norm-before": (network(layer_norm=True), VECTOR, BOX),
    "norm-after-first": (
        network(layer_norm=True, layer_norm_position="after_activation", layer_norm_layers="first"),
        VECTOR,
        BOX,
    ),
    "d2rl": (network(d2rl=True, layer_norm=True), VECTOR, BOX),
    "d2rl-lstm": (network(d2rl=True, rnn=RNNConfig(hidden=9, concat_input=True)), VECTOR, BOX),
    "gru-after": (
        network(
            rnn=RNNConfig(cell="gru", hidden=9, layers=2, position="after_mlp", layer_norm=True, concat_input=True)
        ),
        VECTOR | MASK,
        MultiDiscrete((2, 3)),
    ),
    **{f"activation-{name}": (network(activation=name), VECTOR, BOX) for name in activations.items()},
}
OBSERVATIONS = 10_000
RUNTIME = Path(canter.runtime.__file__)


def export(name, folder, format="c", observations=OBSERVATIONS, **options):
    config, obs, action = EXPORTABLE[name]
    env = Noise(obs, action)
    policy = trained(config, env)
    inputs = collect_inputs(policy, env, observations, seed=0)
    suffix = {"c": ".h", "numpy": ".npz"}[format]
    return export_policy(policy, folder / f"policy{suffix}", format, *inputs, **options), policy, inputs


def test_every_distribution_bound_and_std_is_among_the_compared():
    continuous = {(name, "rescale", "parameter") for name in DISTRIBUTIONS_FOR[Continuous]}
    bounds = {("gaussian", bound, "parameter") for bound in BOUNDS}
    discrete = {
        (name, mask) for kind in (Discrete, MultiDiscrete) for name in DISTRIBUTIONS_FOR[kind] for mask in (0, 1)
    }
    std = {(name, "rescale", "network") for name in ("gaussian", "tanh_gaussian")}
    compared: set[tuple] = set()
    for config, obs, action in EXPORTABLE.values():
        first, *_ = DISTRIBUTIONS_FOR[type(action)]
        name = first if config.distribution == "auto" else config.distribution
        rest = (config.bounds, config.std.kind) if isinstance(action, Continuous) else (int(ACTION_MASK in obs),)
        compared.add((name, *rest))
    assert continuous | bounds | discrete | std <= compared


@pytest.mark.parametrize("name", usual_of(EXPORTABLE, ["multi_categorical-masked", "d2rl-lstm"]))
def test_a_header_equals_the_policy_on_10000_observations(name, tmp_path):
    result, policy, (obs, state) = export(name, tmp_path)
    run = load_header(tmp_path / "policy.h", read_contract(tmp_path / "policy.contract.yaml"))
    action, following = policy.act(obs, state)
    got, *parts = run((obs, state))
    assert result.observations == len(got) == OBSERVATIONS
    scale = action.abs().clamp(min=1.0) if action.is_floating_point() else 1
    assert float(((got - action).abs() / scale).max()) <= 1e-5
    assert len(np.unique(got.numpy(), axis=0)) > 1
    for part, expected in zip(parts, [leaf for layer in following for leaf in layer], strict=True):
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", usual_of(EXPORTABLE, ["beta", "gru"]))
def test_a_numpy_file_equals_the_policy(name, tmp_path):
    result, _, _ = export(name, tmp_path, "numpy", observations=200)
    assert result.max_difference <= 1e-5 or name.startswith("gaussian")
    assert canter.runtime.Policy(tmp_path / "policy.npz").selftest() <= 1e-4


def test_a_recurrent_header_follows_the_policy_for_1000_steps(tmp_path):
    _, policy, (obs, _) = export("lstm", tmp_path, observations=1000)
    export("lstm", tmp_path / "numpy", "numpy", observations=100)
    run = load_header(tmp_path / "policy.h", read_contract(tmp_path / "policy.contract.yaml"))
    loaded = canter.runtime.Policy(tmp_path / "numpy" / "policy.npz")
    state = own = policy.initial_state(1)
    for row in obs["policy"]:
        action, state = policy.act({"policy": row[None]}, state)
        got, *own = run(({"policy": row[None]}, own))
        torch.testing.assert_close(got, action, atol=1e-4, rtol=0)
        np.testing.assert_allclose(loaded.step(row.numpy()), action[0].numpy(), atol=1e-4)


def build(folder, source, *flags):
    (folder / "main.c").write_text(source)
    command = ["gcc", *FLAGS, *flags, "main.c", "-o", "main", "-lm"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return subprocess.run([folder / "main"], capture_output=True, text=True)


MAIN = """\
#include <stdio.h>
#include "policy.h"
int main(void) {
  float obs[POLICY_OBS_SIZE];
  policy_action action[POLICY_ACTION_SIZE];
  int i, k, bad = 0;
  for (k = 0; k < 100; k++) {
    for (i = 0; i < POLICY_OBS_SIZE; i++) obs[i] = (float)((i * 7 + k * 3) % 11) - 5.0f;
    bad += policy_step(obs, action);
  }
  obs[0] = NAN;
  printf("%d %d %d", policy_selftest(), bad, policy_step(obs, action));
  return 0;
}
"""


@pytest.mark.parametrize("weights", usual_of(["float32", "int8"], ["int8"]))
@pytest.mark.parametrize("name", usual_of(EXPORTABLE, ["lstm"]))
def test_a_header_is_clean_under_sanitizers(name, weights, tmp_path):
    export(name, tmp_path, observations=20, weights=weights)
    done = build(tmp_path, MAIN, "-pedantic", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    assert (done.returncode, done.stderr) == (0, "")
    selftest, bad, after_nan = done.stdout.split()
    assert (selftest, bad) == ("0", "0")
    assert after_nan == "1"
    assert "malloc" not in (tmp_path / "policy.h").read_text()


NAMED = Interface(
    obs={
        "policy": (
            Signal(name="vel", size=3, components=("x", "y", "z"), unit="m/s", scale=(2.0,)),
            Signal(name="joint_pos", size=4, components=("hip", "knee"), unit="rad", history=2),
        )
    },
    action=(
        Signal(name="jump", size=2, components=("no", "yes")),
        Signal(name="move", size=3, components=("left", "stay", "right")),
    ),
    joints=(Joint(name="hip", default_position=0.5, effort_limit=30.0),),
)


def test_constants_of_a_header_have_the_names_and_units_of_the_contract(tmp_path):
    env = Noise(VECTOR | MASK, MultiDiscrete((2, 3)))
    env.spec = replace(env.spec, interface=NAMED)
    policy = trained(ModelConfig(), env)
    export_policy(policy, tmp_path / "policy.h", "c", *collect_inputs(policy, env, 20, seed=0))
    header = (tmp_path / "policy.h").read_text()
    lines = [line.strip().partition(",")[::2] for line in header.splitlines() if line.startswith("  POLICY_")]
    constants = {line.partition(" = ")[0]: int(line.partition(" = ")[2]) for line, _ in lines if line.count(" ") == 2}
    assert constants["POLICY_OBS_POLICY_VEL_Z"] == 2
    assert constants["POLICY_OBS_POLICY_JOINT_POS"] == 3
    assert constants["POLICY_OBS_POLICY_JOINT_POS_KNEE"] == 6  # of the newest frame
    assert constants["POLICY_OBS_ACTION_MASK"] == 7
    assert (constants["POLICY_ACTION_JUMP"], constants["POLICY_ACTION_MOVE"]) == (0, 1)  # index in `action`
    assert [constants[f"POLICY_ACTION_MOVE_{option}"] for option in ("LEFT", "STAY", "RIGHT")] == [0, 1, 2]
    assert "POLICY_OBS_POLICY_VEL = 0, /* unit: m/s */" in header
    assert "/* unit: rad; 2 frames, the oldest first, components are of the newest */" in header
    assert "/* POLICY_CONTROL_PERIOD is unknown: the environment does not declare it. */" in header
    assert '{"hip", 0.5f, NAN, NAN, 30.0f}' in header
    assert "void policy_observe(" not in header and "void policy_command(" not in header  # scaling is unknown


def compile_alone(folder, source, *flags):
    (folder / "main.c").write_text(source)
    command = ["gcc", "-std=c99", *flags, "-c", "main.c"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_header_refuses_flags_that_hide_nan_and_a_second_policy(tmp_path):
    for name in ("beta", "dict"):
        export(name, tmp_path / name, observations=20)
    one = '#include "beta/policy.h"\n'
    for flags in (["-O3"], ["-Ofast", "-fno-finite-math-only"]):
        assert compile_alone(tmp_path, one * 2, *flags).returncode == 0
    for flags in (["-Ofast"], ["-ffast-math"], ["-ffinite-math-only"]):
        assert '#error "NaN could not be detected' in compile_alone(tmp_path, one, *flags).stderr
    both = one + '#include "dict/policy.h"\n'
    assert '#error "a file can include one policy' in compile_alone(tmp_path, both, "-O3").stderr


def test_a_changed_weight_fails_the_self_test(tmp_path):
    export("gaussian-rescale", tmp_path, observations=20)
    header = tmp_path / "policy.h"
    text = header.read_text()
    start = text.index("{", text.index("static const float policy_c2["))
    header.write_text(text[: start + 1] + "9.0f, " + text[text.index(",", start) + 1 :])
    assert build(tmp_path, MAIN).stdout.split()[0] != "0"


def test_weights_of_8_bits_report_their_error(tmp_path):
    result, policy, (obs, _) = export("dict", tmp_path, weights="int8")
    assert result.max_difference <= 1e-5 and 1e-4 < result.quantization_error < 0.5
    run = load_header(tmp_path / "policy.h", read_contract(tmp_path / "policy.contract.yaml"))
    difference = (run((obs, ()))[0] - policy.act(obs)[0]).abs().max()
    assert float(difference) == pytest.approx(result.quantization_error, rel=1e-3)
    with pytest.raises(ExportError, match="weights of int8 are for a C header, not for numpy"):
        export("dict", tmp_path / "b", "numpy", observations=20, weights="int8")


class Odd(DiagGaussian):
    """A distribution of a user."""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CASES["image"], r"observation group 'camera' with the encoder CNN"),
        ((ModelConfig(policy=ModuleConfig(module="torch.nn:LazyLinear")), VECTOR, BOX), "the network ModuleNetwork"),
    ],
)
def test_what_c_cannot_express_is_refused_by_name(config, message, tmp_path, monkeypatch):
    config, obs, action = config
    if isinstance(config.policy, ModuleConfig):
        config = ModelConfig(policy=canter.network(lambda inputs: torch.nn.Linear(inputs, 4)))
    env = Noise(obs, action)
    policy = config.build_policy(env.spec)
    with pytest.raises(ExportError, match=message):
        export_policy(policy, tmp_path / "policy.h", "c", *collect_inputs(policy, env, 4, seed=0))
    assert list(tmp_path.iterdir()) == []


def test_parts_of_users_are_refused_by_name():
    env = Noise(VECTOR, BOX)
    policy = ModelConfig().build_policy(env.spec)
    policy.distribution = Odd(3)
    with pytest.raises(ExportError, match="the distribution Odd has no form in C or NumPy"):
        make_program(policy)
    policy = ModelConfig().build_policy(env.spec)
    policy.actor.network.hidden[1] = torch.nn.ELU(alpha=0.5)
    with pytest.raises(ExportError, match=r"the layer ELU\(alpha=0.5\) has no form in C or NumPy"):
        make_program(policy)


def test_the_runtime_is_python_3_10_and_imports_numpy_alone():
    tree = ast.parse(RUNTIME.read_text(), feature_version=(3, 10))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert "numpy" in names and {name.partition(".")[0] for name in names} - {"numpy"} <= sys.stdlib_module_names


def test_the_runtime_needs_neither_torch_nor_canter(tmp_path):
    """The file alone, in a process where both cannot be imported."""
    _, policy, (obs, _) = export("dict", tmp_path, "numpy", observations=20)
    (tmp_path / "runtime.py").write_text(RUNTIME.read_text())
    np.save(tmp_path / "obs.npy", np.concatenate([obs["arm"][3], obs["grid"][3].ravel()]))
    script = (
        "import sys; sys.modules['torch'] = sys.modules['canter'] = None\n"
        "import json, numpy, runtime\n"
        "policy = runtime.Policy('policy.npz')\n"
        "policy.selftest()\n"
        "print(json.dumps(policy.step(numpy.load('obs.npy')).tolist()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = policy.act({name: group[3:4] for name, group in obs.items()})[0][0]
    np.testing.assert_allclose(json.loads(done.stdout), expected.numpy(), rtol=1e-5, atol=1e-5)
    done = subprocess.run([sys.executable, "runtime.py", "policy.npz"], cwd=tmp_path, capture_output=True, text=True)
    assert "test vectors: largest difference" in done.stdout and "p99" in done.stdout
    done = subprocess.run([sys.executable, "runtime.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "usage: python runtime.py policy.npz\n")
    done = subprocess.run([sys.executable, "runtime.py", "none.npz"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "[Errno 2] No such file or directory: 'none.npz'\n")


@pytest.mark.parametrize("name", ["dict", "beta", "multi_categorical-masked"])
def test_the_runtime_refuses_to_act_on_nan(name, tmp_path):
    """A header returns 1; argmax of NaN would be an action like any other."""
    _, _, (obs, _) = export(name, tmp_path, "numpy", observations=20)
    policy = canter.runtime.Policy(tmp_path / "policy.npz")
    groups = {group: obs[group][0].numpy() for group in policy.sizes}
    assert np.isfinite(policy.step(groups)).all()
    first, *_ = groups
    with pytest.raises(ValueError, match="the action is NaN or infinite: stop the robot, and call reset"):
        policy.step(groups | {first: groups[first] * np.nan})


def test_the_runtime_refuses_changed_files_and_other_sizes(tmp_path):
    export("dict", tmp_path, "numpy", observations=20)
    path = tmp_path / "policy.npz"
    policy = canter.runtime.Policy(path)
    with pytest.raises(ValueError, match=r"observation has 3 numbers, expected \{'arm': 3, 'grid': 8\}"):
        policy.step(np.zeros(3))
    with pytest.raises(ValueError, match="observation group 'grid' has 7 numbers, expected 8"):
        policy.step({"arm": np.zeros(3), "grid": np.zeros(7)})
    with pytest.raises(ValueError, match=r"observation lacks arm, expected \{'arm': 3, 'grid': 8\}"):
        policy.step({"grid": np.zeros(8)})
    with pytest.raises(ValueError, match=r"contract.yaml is no policy: expected a file of `canter export RUN"):
        canter.runtime.Policy(tmp_path / "policy.contract.yaml")
    (tmp_path / "half.npz").write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"half.npz is damaged: File is not a zip file"):
        canter.runtime.Policy(tmp_path / "half.npz")
    with np.load(path) as file:
        arrays = dict(file)
    arrays["c0"] = arrays["c0"] + 1
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="sha256 does not match"):
        canter.runtime.Policy(path)
