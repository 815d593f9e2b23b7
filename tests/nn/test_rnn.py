import itertools

import pytest
import torch
from torch import nn

from canter.core.plain import from_plain
from canter.core.specs import TensorSpec
from canter.core.struct import tree_map
from canter.nn.cnn import CNNConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNN, RNNConfig

OBS = {"policy": TensorSpec((5,)), "camera": TensorSpec((3, 16, 16), torch.uint8)}
CNN = CNNConfig(layers=((4, 4, 2),), features=9)
L, B = 12, 7


def observations(length=L, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "policy": torch.randn(length, B, 5, generator=generator),
        "camera": torch.randint(0, 256, (length, B, 3, 16, 16), generator=generator, dtype=torch.uint8),
    }


def resets(probability=0.3, seed=1):
    return torch.rand(L, B, generator=torch.Generator().manual_seed(seed)) < probability


VARIANTS = list(itertools.product(["lstm", "gru"], [1, 2], ["before_mlp", "after_mlp"], [False, True]))


@pytest.mark.parametrize(("cell", "layers", "position", "extras"), VARIANTS)
def test_step_by_step_equals_the_whole_sequence(cell, layers, position, extras):
    torch.manual_seed(0)
    memory = RNNConfig(cell=cell, hidden=6, layers=layers, position=position, layer_norm=extras, concat_input=extras)
    network = NetworkConfig(obs_groups=("policy", "camera"), hidden=(8,), cnn=CNN, rnn=memory).build(OBS, "policy")
    obs, reset = observations(), resets()
    state = tree_map(lambda x: torch.randn_like(x), network.initial_state(B))
    at_once, last = network(obs, state, reset)
    tolerance = 1e-5 if extras else 1e-6  # layer norm divides by the small spread of an untrained memory
    assert at_once.shape == (L, B, network.features)
    for t in range(L):
        row, state = network(tree_map(lambda x, t=t: x[t : t + 1], obs), state, reset[t : t + 1])
        torch.testing.assert_close(row[0], at_once[t], atol=tolerance, rtol=0)
    tree_map(lambda a, b: torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6), state, last)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_outputs_are_those_of_torch_run_episode_by_episode(cell):
    """The oracle is torch's own sequence module, started from zero after every reset."""
    torch.manual_seed(0)
    memory = RNN(RNNConfig(cell=cell, hidden=6, layers=2), 5, "torch")
    oracle = (nn.LSTM if cell == "lstm" else nn.GRU)(5, 6, num_layers=2)
    for layer, own in enumerate(memory.cells):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(oracle, f"{name}_l{layer}").data.copy_(getattr(own, name))
    x, reset = torch.randn(L, B, 5), resets()
    outputs, _ = memory(x, memory.initial_state(B), reset)
    for b in range(B):
        starts = sorted({0, *reset[:, b].nonzero().flatten().tolist()})
        for start, stop in itertools.pairwise([*starts, L]):
            expected, _ = oracle(x[start:stop, b : b + 1])
            torch.testing.assert_close(outputs[start:stop, b : b + 1], expected, atol=1e-6, rtol=0)


def test_steps_before_a_reset_have_no_influence_not_even_a_nan():
    torch.manual_seed(0)
    memory = RNN(RNNConfig(hidden=6), 5, "orthogonal")
    x, reset = torch.randn(4, 1, 5), torch.tensor([[False], [False], [True], [False]])
    clean, _ = memory(x, memory.initial_state(1), reset)
    x[:2] = torch.nan
    poisoned, _ = memory(x, memory.initial_state(1), reset)
    assert poisoned[:2].isnan().all()
    assert torch.equal(poisoned[2:], clean[2:])


def test_recurrent_state_can_be_kept_over_the_end_of_an_episode():
    torch.manual_seed(0)
    memory = RNN(RNNConfig(hidden=6, reset_on_end=False), 5, "orthogonal")
    x = torch.randn(4, 1, 5)
    everywhere, _ = memory(x, memory.initial_state(1), torch.ones(4, 1, dtype=torch.bool))
    nowhere, _ = memory(x, memory.initial_state(1), None)
    assert torch.equal(everywhere, nowhere)


def test_states_after_each_row_continue_where_the_sequence_stood():
    torch.manual_seed(0)
    network = NetworkConfig(obs_groups=("policy",), rnn=RNNConfig(hidden=6)).build(OBS, "policy")
    obs, reset = observations(), resets()
    whole, states = network.unroll(obs, network.initial_state(B), reset)
    rest = tree_map(lambda x: x[5:], obs)
    again, _ = network(rest, tree_map(lambda rows: rows[4], states), reset[5:])
    torch.testing.assert_close(again, whole[5:], atol=1e-6, rtol=0)


def test_a_feed_forward_network_has_no_state():
    network = NetworkConfig(obs_groups=("policy",)).build(OBS, "policy")
    assert network.initial_state(3) == ()
    assert network(observations(), (), None)[1] == ()


def test_a_recurrent_layer_without_units_is_refused():
    with pytest.raises(ValueError, match="hidden=0 must be at least 1"):
        RNNConfig(hidden=0)


def test_settings_under_the_old_name_are_read():
    """Run folders and policy files of earlier versions call the recurrent layers `memory`."""
    assert from_plain({"memory": {"cell": "gru"}}, NetworkConfig()) == NetworkConfig(rnn=RNNConfig(cell="gru"))
    assert from_plain({"memory": None}, NetworkConfig()) == NetworkConfig()
