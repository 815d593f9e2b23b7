"""Networks that a source library could not load from a file are refused when it is written.

`python benchmarks/parity/checkpoints.py` loads what is written in the libraries themselves.
"""

from dataclasses import replace

import pytest
import torch

import canter
from canter.compat.rl_games import checkpoint as rl_games
from canter.compat.rsl_rl import checkpoint as rsl_rl
from canter.core.plain import ConfigError, from_plain, nest

LSTM = {"model.policy.rnn.cell": "lstm", "model.policy.rnn.hidden": 4}
BASE = {
    "horizon": 8,
    "num_minibatches": 1,
    "sequence_length": 4,
    "model.policy.hidden": [6, 4],
    "model.policy.normalize_obs": False,
    "model.normalize_value": False,
    "model.std.form": "log",
}
SPEC = canter.EnvSpec({"policy": canter.TensorSpec((3,))}, canter.Continuous((-1.0,) * 2, (1.0,) * 2), 4)


IMAGE = (2, 9, 9)
SEEING = canter.EnvSpec(
    {"policy": canter.TensorSpec((3,)), "camera": canter.TensorSpec(IMAGE)}, canter.Continuous((-1.0,), (1.0,)), 4
)
CNN = {"model.policy.cnn.layers": [[4, 3, 2], [5, 3, 1, 1]], "model.policy.cnn.features": None}
BOTH = CNN | {"model.policy.obs_groups": ["policy", "camera"]}
ONE = CNN | {"model.policy.obs_groups": ["camera"]}
IMPALA = ONE | {"model.policy.cnn.kind": "impala", "model.policy.cnn.depths": [3, 4], "model.shared_trunk": True}


def build(settings):
    spec = SEEING if any(".cnn." in key for key in settings) else SPEC
    return from_plain(nest(BASE | settings, {}), canter.PPOConfig()).build(spec, 0)


REFUSED = [
    ({"model.policy.d2rl": True}, 5, "model.policy.d2rl=true: no file of RSL-RL 5.x"),
    ({"model.policy.layer_norm": True}, 3, "model.policy.layer_norm=true: no file of RSL-RL 3.x"),
    (LSTM | {"model.policy.rnn.position": "after_mlp"}, 5, "model.policy.rnn.position=after_mlp"),
    (LSTM | {"model.policy.rnn.layer_norm": True}, 5, "model.policy.rnn.layer_norm=true"),
    (LSTM | {"model.policy.rnn.concat_input": True}, 5, "model.policy.rnn.concat_input=true"),
    (LSTM | {"model.critic.hidden": [4]}, 3, "model.critic.rnn: RSL-RL 3.x"),
    ({"model.shared_trunk": True}, 5, "RSL-RL has two networks"),
    ({"model.std.kind": "network"}, 2, "model.std.kind=network: RSL-RL 2.x"),
    ({"model.distribution": "beta", "model.action_range": [-1.0, 1.0]}, 4, "model.distribution=beta: RSL-RL 4.x"),
    ({"model.policy.d2rl": True}, None, "model.policy.d2rl=true: no file of rl_games"),
    ({"model.policy.layer_norm": True}, None, "model.policy.layer_norm=true: no file of rl_games"),
    ({"model.distribution": "beta", "model.action_range": [-1.0, 1.0]}, None, "model.distribution=beta: rl_games"),
    ({"model.critic.hidden": [7]}, None, "model.critic: rl_games' separate critic"),
    (ONE | {"model.policy.cnn.features": 8}, 5, "model.policy.cnn.features other than null: no file of RSL-RL 5.x"),
    (ONE | {"model.policy.cnn.features": 8}, None, "model.policy.cnn.features other than null: no file of rl_games"),
    (IMPALA | {"model.shared_trunk": False}, 5, "model.policy.cnn.kind=impala: no file of RSL-RL 5.x"),
    (IMPALA | {"model.shared_trunk": False}, None, "model.policy.cnn.kind=impala: rl_games' residual network"),
    (IMPALA | {"model.policy.obs_groups": ["camera", "policy"]}, None, "model.policy.cnn.kind=impala: rl_games'"),
    (ONE, 3, "generation=3: RSL-RL has had policies with this encoder since 4.0"),
    (BOTH | {"model.policy.obs_groups": ["camera", "policy"]}, 5, "obs_groups with an image before a vector"),
]


@pytest.mark.parametrize(("settings", "generation", "words"), REFUSED, ids=lambda part: str(part)[:60])
def test_files_that_the_library_could_not_load_are_not_written(settings, generation, words):
    ppo = build(settings)
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        rl_games.dump(ppo, 1, 1, 0.0) if generation is None else rsl_rl.dump(ppo, 1, generation=generation)


WRITTEN = [
    (LSTM, 1),
    (LSTM | {"model.critic.hidden": [4]}, 5),
    ({"model.std.kind": "network"}, 3),
    ({"model.distribution": "beta", "model.action_range": [-1.0, 1.0]}, 5),
    (LSTM | {"model.policy.rnn.position": "after_mlp", "model.policy.rnn.layer_norm": True}, None),
    ({"model.critic.hidden": [7], "central_value.num_minibatches": 1}, None),
    ({"model.shared_trunk": True}, None),
    (BOTH, 5),
    (ONE, None),
    (IMPALA, None),
]


@pytest.mark.parametrize(("settings", "generation"), WRITTEN, ids=lambda part: str(part)[:60])
def test_others_are_written_and_read_again(settings, generation, tmp_path):
    ppo, other = build(settings), build(settings)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    library = rl_games if generation is None else rsl_rl
    tree = rl_games.dump(ppo, 1, 1, 0.0) if generation is None else rsl_rl.dump(ppo, 1, generation=generation)
    library.load(other, library.weights_in(tree, tmp_path))
    for one, two in zip(ppo.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two)


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def both(name, *shape):
    """The weight and the bias of a layer."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def test_images_are_written_by_the_names_and_shapes_of_rsl_rls_cnn_model():
    ppo = build(BOTH)
    tree = rsl_rl.dump(ppo, 1)
    # 9 pixels become 4 by the first kernel, which the second keeps: 5 * 4 * 4 features behind 3 numbers.
    body = both("cnns.camera.0", 4, 2, 3, 3) | both("cnns.camera.2", 5, 4, 3, 3)
    body |= both("mlp.0", 6, 3 + 80) | both("mlp.2", 4, 6)
    std = {"distribution.log_std_param": (1,)}
    assert shapes_of(tree["actor_state_dict"]) == body | both("mlp.4", 1, 4) | std
    assert shapes_of(tree["critic_state_dict"]) == body | both("mlp.4", 1, 4)
    vectors = torch.cat([torch.ones(2, 3), torch.zeros(2, 80)], 1)
    rows = {"policy": torch.ones(2, 3), "camera": torch.zeros(2, *IMAGE)}
    with torch.no_grad():
        for layer in ppo.model.actor.network.encoders[1].parameters():
            layer.zero_()
        encoded = ppo.model.actor.network.encode(rows)
    assert torch.equal(encoded, vectors), "numbers first, as RSL-RL joins them"


def test_images_are_written_by_the_names_and_shapes_of_rl_games():
    body = both("actor_cnn.0", 4, 2, 3, 3) | both("actor_cnn.2", 5, 4, 3, 3) | both("actor_mlp.0", 6, 80)
    body |= both("critic_cnn.0", 4, 2, 3, 3) | both("critic_cnn.2", 5, 4, 3, 3) | both("critic_mlp.0", 6, 80)
    body |= both("actor_mlp.2", 4, 6) | both("critic_mlp.2", 4, 6) | both("value", 1, 4) | both("mu", 1, 4)
    expected = {f"a2c_network.{name}": shape for name, shape in (body | {"sigma": (1,)}).items()}
    model = rl_games.dump(build(ONE), 1, 1, 0.0)["model"]
    assert shapes_of(model) == expected
    parts = [name.split(".")[1] for name in model]
    order = ["sigma", "actor_cnn", "critic_cnn", "actor_mlp", "critic_mlp", "value", "mu"]
    assert list(dict.fromkeys(parts)) == order, "of rl_games' modules, which its optimizer follows"


def test_a_file_of_images_has_statistics_that_change_nothing_as_rl_games_normalises_each_pixel():
    ppo = build(ONE | {"model.policy.normalize_obs": True})
    tree = rl_games.dump(ppo, 1, 1, 0.0)
    buffers = {name: x for name, x in tree["model"].items() if name.startswith("running_mean_std.")}
    assert shapes_of(buffers) == {
        "running_mean_std.running_mean": IMAGE,
        "running_mean_std.running_var": IMAGE,
        "running_mean_std.count": (),
    }
    image = torch.rand(4, *IMAGE)
    mean, variance = buffers["running_mean_std.running_mean"], buffers["running_mean_std.running_var"]
    torch.testing.assert_close(
        ((image - mean) / (variance + 1e-5).sqrt()).clamp(-5, 5), image.double(), rtol=1e-5, atol=0
    )
    rl_games.load(ppo, rl_games.weights_in(tree, "file"))
    tree["model"]["running_mean_std.running_mean"] = mean + 0.1
    with pytest.raises(ConfigError, match="the file has statistics, but the settings do not normalise"):
        rl_games.load(ppo, rl_games.weights_in(tree, "file"))


def test_statistics_of_sequences_have_their_shape():
    spec = replace(SPEC, obs={"policy": canter.TensorSpec((3, 12))})
    sequences = {"model.policy.cnn.sequences": True, "model.policy.cnn.layers": [[4, 3, 2]]}
    settings = BASE | sequences | {"model.policy.cnn.features": None, "model.policy.normalize_obs": True}
    model = rl_games.dump(from_plain(nest(settings, {}), canter.PPOConfig()).build(spec, 0), 1, 1, 0.0)["model"]
    assert model["running_mean_std.running_mean"].shape == (3, 12)
    assert model["a2c_network.actor_cnn.0.weight"].shape == (4, 3, 3)


def test_residual_blocks_are_written_by_the_names_and_shapes_of_rl_games():
    gru = {"model.policy.rnn.cell": "gru", "model.policy.rnn.hidden": 7, "model.policy.rnn.position": "before_mlp"}
    model = rl_games.dump(build(IMPALA | gru), 1, 1, 0.0)["model"]
    blocks = [f"res_block{i}.conv{j}.conv" for i in (1, 2) for j in (1, 2)]
    body = {}
    for stage, (before, channels) in enumerate([(2, 3), (3, 4)]):
        body |= both(f"cnn.{stage}.conv.conv", channels, before, 3, 3)
        for name in blocks:
            body |= both(f"cnn.{stage}.{name}", channels, channels, 3, 3)
    # 9 pixels become 5, then 3: 4 * 3 * 3 features.
    body |= {f"rnn.rnn.{kind}_{part}_l0": (21, 36 if part == "ih" else 7)[: 1 + (kind == "weight")]
             for kind in ("weight", "bias") for part in ("ih", "hh")}  # fmt: skip
    body |= both("mlp.0", 6, 7) | both("mlp.2", 4, 6) | both("value", 1, 4) | both("mu", 1, 4) | {"sigma": (1,)}
    assert shapes_of(model) == {f"a2c_network.{name}": shape for name, shape in body.items()}
    parts = list(dict.fromkeys(name.split(".")[1] for name in model))
    assert parts == ["sigma", "cnn", "rnn", "mlp", "value", "mu"], "of rl_games' modules, which its optimizer follows"


AMP = {
    "kind": "amp",
    "motions": ["canter:swimmer_wide.npz"],
    "columns": ["dof_positions/joint_1", "dof_positions/joint_2"],
    "time_step": 0.02,
    "hidden": [5, 3],
    "batch_size": 4,
    "replay": 32,
    "replay_rows": 4,
}


def test_amp_is_written_by_the_names_shapes_and_order_of_isaac_gym_envs():
    settings = BASE | {"model.policy.obs_groups": ["policy"], "model.std.learn": False, "extensions": [AMP]}
    spec = replace(SPEC, obs={"policy": canter.TensorSpec((3,)), "amp": canter.TensorSpec((2,))})
    tree = rl_games.dump(from_plain(nest(settings, {}), canter.PPOConfig()).build(spec, 0), 1, 1, 0.0)
    body = {"sigma": (2,)}
    for role in ("actor", "critic"):
        body |= both(f"{role}_mlp.0", 6, 3) | both(f"{role}_mlp.2", 4, 6)
    body |= both("value", 1, 4) | both("mu", 2, 4)
    body |= both("_disc_mlp.0", 5, 4) | both("_disc_mlp.2", 3, 5) | both("_disc_logits", 1, 3)  # two frames of 2
    expected = {f"a2c_network.{name}": shape for name, shape in body.items()}
    assert list(shapes_of(tree["model"]).items()) == list(expected.items()), "the optimizer follows this order"
    assert shapes_of(tree["amp_input_mean_std"]) == {"running_mean": (4,), "running_var": (4,), "count": ()}
    shapes = [torch.zeros(shape) for shape in expected.values()]
    torch.optim.Adam(shapes).load_state_dict(tree["optimizer"])
