"""Networks that a source library could not load from a file are refused when it is written.

`python benchmarks/parity/checkpoints.py` loads what is written in the libraries themselves.
"""

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


def build(settings):
    return from_plain(nest(BASE | settings, {}), canter.PPOConfig()).build(SPEC, 0)


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
