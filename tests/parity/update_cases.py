"""Rollouts, initial parameters and settings of updates in which Canter must equal rl_games and RSL-RL exactly.

Plain data and NumPy only: it is read where Canter is installed and where the source libraries are.
T steps, N environments.
"""

import zlib

import numpy as np

T, N, ITERATIONS = 8, 8, 2
OBS, STATES, ACTIONS = 5, 7, 2
HIDDEN, MEMORY = [6, 4], 4
CHOICES = {"discrete": [4], "multi_discrete": [3, 2]}

# The settings of the source libraries are those of `rsl_rl` and `rl_games` below, with the changes of
# a case. Canter's settings stand next to them.
RSL_RL = {
    "num_learning_epochs": 4,
    "num_mini_batches": 4,
    "clip_param": 0.2,
    "gamma": 0.97,
    "lam": 0.9,
    "value_loss_coef": 1.0,
    "entropy_coef": 0.01,
    "learning_rate": 1e-3,
    "max_grad_norm": 1.0,
    "use_clipped_value_loss": True,
    "schedule": "fixed",
    "desired_kl": 0.01,
}
RSL_RL_HERE = {
    "horizon": T,
    "epochs": 4,
    "num_minibatches": 4,
    "shuffle": "rollout",
    "gamma": 0.97,
    "gae_lambda": 0.9,
    "value_loss": "clipped",
    "value_coef": 2.0,
    "entropy_coef": 0.01,
    "advantage_std": "sample",
    "gradient_clipping": "per_network",
    "optimizer.learning_rate": 1e-3,
    "optimizer.eps": 1e-8,
    "optimizer.max_grad_norm": 1.0,
    "model.bounds": "none",
    "model.normalize_value": False,
    "model.std.form": "scalar",
    "model.policy.hidden": HIDDEN,
    "model.policy.activation": "elu",
    "model.policy.normalize_obs": False,
    "model.critic.hidden": HIDDEN,
    "model.critic.activation": "elu",
    "model.critic.normalize_obs": False,
}
RATE = "optimizer.learning_rate"
RSL_RL_ADAPTIVE = {
    f"{RATE}.kind": "adaptive_kl",
    f"{RATE}.start": 1e-3,
    f"{RATE}.target_kl": 0.01,
    f"{RATE}.every": "minibatch",
    f"{RATE}.minimum": 1e-5,
}


def _both(settings):
    return {f"model.{network}.{key}": value for network in ("policy", "critic") for key, value in settings.items()}


NORMALIZED = _both({"normalize_obs": True, "normalizer.eps": 0.01, "normalizer.eps_on": "std"})
NORMALIZED |= _both({"normalizer.clip": None})


def _memory(cell, layers):
    own = _both({"rnn.cell": cell, "rnn.hidden": MEMORY, "rnn.layers": layers})
    return own | {"sequence_length": T, "shuffle": "none"}


RL_GAMES = {
    "mini_epochs": 4,
    "minibatch_size": 16,
    "horizon_length": T,
    "gamma": 0.97,
    "tau": 0.9,
    "e_clip": 0.2,
    "clip_value": True,
    "critic_coef": 2,
    "entropy_coef": 0.01,
    "bounds_loss_coef": 0.0,
    "learning_rate": 1e-3,
    "lr_schedule": None,
    "grad_norm": 1.0,
    "truncate_grads": True,
    "normalize_advantage": True,
    "normalize_input": False,
    "normalize_value": False,
    "value_bootstrap": True,
    "separate": False,
}
RL_GAMES_HERE = {
    "horizon": T,
    "epochs": 4,
    "num_minibatches": 4,
    "shuffle": "none",
    "gamma": 0.97,
    "gae_lambda": 0.9,
    "value_loss": "clipped",
    "value_coef": 2.0,
    "entropy_coef": 0.01,
    "advantage_std": "sample",
    "optimizer.learning_rate": 1e-3,
    "optimizer.eps": 1e-8,
    "optimizer.max_grad_norm": 1.0,
    "model.normalize_value": False,
    "model.std.form": "log",
    "model.shared_trunk": True,
    "model.policy.hidden": HIDDEN,
    "model.policy.activation": "elu",
    "model.policy.normalize_obs": False,
}
SEPARATE = {"model.shared_trunk": False}
INPUT = {
    "obs_statistics": "minibatch",
    "model.policy.normalize_obs": True,
    "model.policy.normalizer.eps": 1e-5,
    "model.policy.normalizer.clip": 5.0,
    "model.policy.normalizer.prior_count": 1.0,
}
VALUE = {
    "model.normalize_value": True,
    "model.value_normalizer.rescale": False,
    "model.value_normalizer.of": "values_and_returns",
    "model.value_normalizer.eps": 1e-5,
    "model.value_normalizer.clip": 5.0,
    "model.value_normalizer.prior_count": 1.0,
}
BOTH = {"normalize_input": True, "normalize_value": True}
BOTH_HERE = INPUT | VALUE
OLD = {"release": "1.6.1"}
SAMPLE = {f"model.{part}.variance": "sample" for part in ("policy.normalizer", "value_normalizer")}
OLD_HERE = BOTH_HERE | SAMPLE | {"obs_statistics": "first_epoch"}
SOFT = {"bound_loss.form": "soft", "bound_loss.coef": 0.01, "bound_loss.limit": 1.1}


def _adaptive(every):
    return {
        "kl": "rl_games",
        f"{RATE}.kind": "adaptive_kl",
        f"{RATE}.start": 1e-3,
        f"{RATE}.target_kl": 0.008,
        f"{RATE}.every": every,
    }


def _rnn(cell, before_mlp):
    return {"rnn": {"name": cell, "units": MEMORY, "layers": 1, "before_mlp": before_mlp}, "seq_length": 4}


def _rnn_here(cell, position):
    own = {"rnn.cell": cell, "rnn.hidden": MEMORY, "rnn.position": position}
    return {f"model.policy.{key}": value for key, value in own.items()} | {"sequence_length": 4}


CENTRAL = {
    "central_value_config": {
        "minibatch_size": 32,
        "mini_epochs": 3,
        "learning_rate": 2e-3,
        "clip_value": True,
        "normalize_input": True,
        "truncate_grads": True,
        "grad_norm": 1.0,
    }
}
CENTRAL_RNN = {"central_network": {"rnn": {"name": "lstm", "units": MEMORY, "layers": 1}}, "seq_length": 4}
CENTRAL_RNN_HERE = {
    "model.critic.rnn.cell": "lstm",
    "model.critic.rnn.hidden": MEMORY,
    "model.critic.rnn.position": "after_mlp",
    "sequence_length": 4,
    "central_value.recurrence": "rl_games",
}
CENTRAL_HERE = {
    "model.shared_trunk": False,
    "model.critic.hidden": HIDDEN,
    "model.critic.activation": "elu",
    "model.critic.normalizer.eps": 1e-5,
    "model.critic.normalizer.clip": 5.0,
    "model.critic.normalizer.prior_count": 1.0,
    "central_value.epochs": 3,
    "central_value.num_minibatches": 2,
    "central_value.value_coef": 2.0,
    "central_value.actor_value": True,
    "central_value.optimizer.learning_rate": 2e-3,
    "central_value.optimizer.eps": 1e-8,
    "central_value.optimizer.max_grad_norm": 1.0,
}


def _case(parent, action, theirs, here):
    if f"{RATE}.kind" in here:
        here = {key: value for key, value in here.items() if key != RATE}
    return {"parent": parent, "action": action, "theirs": theirs, "here": here}


def _rsl(theirs, here):
    return _case("rsl_rl", "continuous", RSL_RL | theirs, RSL_RL_HERE | here)


def _rlg(theirs, here, action="continuous"):
    return _case("rl_games", action, RL_GAMES | theirs, RL_GAMES_HERE | here)


def _curious(normalize):
    """Curiosity, with both normalisers or without."""
    theirs = {"weight": 0.3, "num_outputs": 3, "predictor_hidden_dims": HIDDEN, "target_hidden_dims": [5]}
    theirs |= {"num_states": OBS, "obs_groups": {"rnd_state": ["policy"]}, "learning_rate": 2e-3}
    theirs |= {"state_normalization": normalize, "reward_normalization": normalize}
    optimizer = {"learning_rate": 2e-3, "eps": 1e-8, "max_grad_norm": float("inf")}
    here = {"kind": "rnd", "variant": "rsl_rl", "error": "norm", "weight": 0.3, "outputs": 3, "hidden": HIDDEN}
    here |= {"target_hidden": [5], "normalize_obs": normalize, "normalize_bonus": normalize, "optimizer": optimizer}
    here |= {"obs_groups": ["policy"], "epochs": 4, "num_minibatches": 4}
    return {"rnd_cfg": theirs}, {"extensions": [here]}


ADAPTIVE = {"schedule": "adaptive"}
RANGE = [-2.0, 3.0]
BETA_HERE = {"model.distribution": "beta", "model.action_range": RANGE}
LEGACY = {"lr_schedule": "adaptive", "kl_threshold": 0.008, "schedule_type": "legacy"}
CASES = {
    "rsl_rl scalar": _rsl({}, {}),
    "rsl_rl log": _rsl({"std_type": "log"}, {"model.std.form": "log"}),
    "rsl_rl std that does not learn": _rsl({"learn_std": False}, {"model.std.learn": False}),
    "rsl_rl adaptive": _rsl(ADAPTIVE, RSL_RL_ADAPTIVE),
    "rsl_rl normalisers, adaptive": _rsl({"obs_normalization": True} | ADAPTIVE, NORMALIZED | RSL_RL_ADAPTIVE),
    "rsl_rl unclipped value, minibatch advantages": _rsl(
        {"use_clipped_value_loss": False, "normalize_advantage_per_mini_batch": True},
        {"value_loss": "mse", "advantage_normalization": "minibatch"},
    ),
    "rsl_rl remainder": _rsl({"num_mini_batches": 5}, {"num_minibatches": 5, "uneven_minibatches": "drop"}),
    "rsl_rl lstm, two layers, adaptive": _rsl(
        {"rnn_type": "lstm", "rnn_num_layers": 2} | ADAPTIVE, _memory("lstm", 2) | RSL_RL_ADAPTIVE
    ),
    "rsl_rl gru, normalisers, log": _rsl(
        {"rnn_type": "gru", "rnn_num_layers": 1, "obs_normalization": True, "std_type": "log"},
        _memory("gru", 1) | NORMALIZED | {"model.std.form": "log"},
    ),
    "rsl_rl curiosity": _rsl(*_curious(normalize=False)),
    "rsl_rl curiosity, normalised": _rsl(*_curious(normalize=True)),
    "rsl_rl beta": _rsl({"action_range": RANGE}, BETA_HERE),
    "rsl_rl beta, normalisers": _rsl({"action_range": RANGE, "obs_normalization": True}, BETA_HERE | NORMALIZED),
    "rl_games shared, bounds": _rlg({"bounds_loss_coef": 0.01}, SOFT),
    "rl_games separate, smooth, regularisation": _rlg(
        {
            "separate": True,
            "use_smooth_clamp": True,
            "bounds_loss_coef": 0.01,
            "bound_loss_type": "regularisation",
            "clip_value": False,
        },
        SEPARATE
        | {"surrogate": "smooth_clipped", "value_loss": "mse"}
        | {"bound_loss.form": "regularisation", "bound_loss.coef": 0.01},
    ),
    "rl_games value normaliser": _rlg({"normalize_value": True}, VALUE),
    "rl_games input normaliser": _rlg({"normalize_input": True}, INPUT),
    "rl_games both normalisers, separate": _rlg(BOTH | {"separate": True}, BOTH_HERE | SEPARATE),
    "rl_games legacy adaptive": _rlg(LEGACY, _adaptive("step")),
    "rl_games legacy adaptive, both normalisers, bounds": _rlg(
        BOTH | LEGACY | {"bounds_loss_coef": 0.01}, BOTH_HERE | _adaptive("step") | SOFT
    ),
    "rl_games standard adaptive, both normalisers": _rlg(
        BOTH | LEGACY | {"schedule_type": "standard"}, BOTH_HERE | _adaptive("epoch")
    ),
    "rl_games no bootstrap, weight decay": _rlg(
        {"value_bootstrap": False, "weight_decay": 0.1},
        {
            "bootstrap_truncated": False,
            "optimizer.weight_decay": 0.1,
            "optimizer.weight_decay_form": "coupled",
        },
    ),
    "rl_games discrete, both normalisers": _rlg(BOTH, BOTH_HERE, "discrete"),
    "rl_games discrete, adaptive": _rlg(LEGACY, _adaptive("epoch"), "discrete"),
    "rl_games discrete, masks": _rlg({"use_action_masks": True}, {}, "discrete"),
    "rl_games multi-discrete": _rlg({}, {}, "multi_discrete"),
    "rl_games lstm after layers": _rlg(_rnn("lstm", False), _rnn_here("lstm", "after_mlp")),
    "rl_games gru before layers, both normalisers, separate": _rlg(
        _rnn("gru", True) | BOTH | {"separate": True}, _rnn_here("gru", "before_mlp") | BOTH_HERE | SEPARATE
    ),
    "rl_games gru of two layers with layer norm and its input, after layers": _rlg(
        {"rnn": _rnn("gru", False)["rnn"] | {"layers": 2, "layer_norm": True, "concat_input": True}, "seq_length": 4},
        _rnn_here("gru", "after_mlp")
        | {"model.policy.rnn.layers": 2, "model.policy.rnn.layer_norm": True, "model.policy.rnn.concat_input": True},
    ),
    "rl_games std of the network, separate": _rlg(
        {"separate": True, "fixed_sigma": False}, SEPARATE | {"model.std.kind": "network"}
    ),
    "rl_games central value": _rlg(BOTH | CENTRAL, BOTH_HERE | CENTRAL_HERE),
    "rl_games 1.6.1, both normalisers, legacy adaptive": _rlg(OLD | BOTH | LEGACY, OLD_HERE | _adaptive("step")),
    "rl_games 1.6.1, both normalisers, separate, no bootstrap by default": _rlg(
        OLD | BOTH | {"separate": True, "value_bootstrap": None}, OLD_HERE | SEPARATE | {"bootstrap_truncated": False}
    ),
    "rl_games 1.6.1, discrete, both normalisers": _rlg(OLD | BOTH, BOTH_HERE | SAMPLE, "discrete"),
    "rl_games 1.6.1, central value": _rlg(
        OLD | BOTH | CENTRAL, OLD_HERE | CENTRAL_HERE | {"model.critic.normalizer.variance": "sample"}
    ),
    "rl_games 2.0, both normalisers, legacy adaptive": _rlg(
        {"release": "2.0"} | BOTH | LEGACY, BOTH_HERE | _adaptive("step")
    ),
    "rl_games lstm central value, lstm": _rlg(
        BOTH | CENTRAL | CENTRAL_RNN | _rnn("lstm", False),
        BOTH_HERE | CENTRAL_HERE | CENTRAL_RNN_HERE | _rnn_here("lstm", "after_mlp"),
    ),
    "rl_games lstm central value, layers only": _rlg(
        BOTH | CENTRAL | CENTRAL_RNN, BOTH_HERE | CENTRAL_HERE | CENTRAL_RNN_HERE
    ),
    "rl_games central value, two agents": _rlg(
        BOTH | CENTRAL | {"agents": 2},
        BOTH_HERE | CENTRAL_HERE | {"central_value.agents": "first", "central_value.num_minibatches": 1},
    ),
    "rl_games lstm central value, two agents": _rlg(
        BOTH | CENTRAL | CENTRAL_RNN | {"agents": 2},
        BOTH_HERE
        | CENTRAL_HERE
        | CENTRAL_RNN_HERE
        | {"central_value.agents": "first", "central_value.num_minibatches": 1},
    ),
    "rl_games lstm central value, lstm, two agents": _rlg(
        BOTH | CENTRAL | CENTRAL_RNN | _rnn("lstm", False) | {"agents": 2},
        BOTH_HERE
        | CENTRAL_HERE
        | CENTRAL_RNN_HERE
        | _rnn_here("lstm", "after_mlp")
        | {"central_value.agents": "first", "central_value.num_minibatches": 1},
    ),
    "rl_games central value, actor without a value": _rlg(
        BOTH | CENTRAL | {"use_experimental_cv": False},
        BOTH_HERE | CENTRAL_HERE | {"central_value.actor_value": False},
    ),
}


INSTALLED = {name: case for name, case in CASES.items() if "release" not in case["theirs"]}
"""Cases of the installed releases: RSL-RL 5.5.1 and rl_games 1.6.5."""
LOGGED = ("rnd_loss", "rnd_bonus")
"""Numbers of each iteration that the libraries log."""


def rollouts(case):
    """Return the data of all iterations, `[ITERATIONS * T, N, ...]`; observations have one step more."""
    random, rows = np.random.RandomState(0), (ITERATIONS * T, N)
    ended = random.rand(*rows)
    choices = CHOICES.get(case["action"], [])
    mask = random.rand(*rows, sum(choices)) < 0.6
    drawn = [random.randint(n, size=rows) for n in choices]
    for start, action in zip(np.cumsum([0, *choices]), drawn, strict=False):
        np.put_along_axis(mask, (start + action)[..., None], True, axis=-1)
    agents = case["theirs"].get("agents", 1)
    found = {
        "obs": (2 * random.randn(rows[0] + 1, N, OBS) + 1).astype(np.float32),
        "states": random.randn(rows[0] + 1, N, STATES).astype(np.float32),
        "noise": random.randn(*rows, ACTIONS).astype(np.float32),
        "reward": random.randn(*rows).astype(np.float32),
        "terminated": ended < 0.08,
        "truncated": (ended > 0.9),
        "mask": mask,
        "choices": np.stack(drawn, -1) if drawn else np.zeros((*rows, 0), int),
    }
    shared = ("states", "terminated", "truncated") if agents > 1 else ()  # by the agents of a world
    return found | {name: found[name][:, ::agents].repeat(agents, 1) for name in shared}


def order(iteration, count):
    """The random order of an iteration."""
    return np.random.RandomState(100 + iteration).permutation(count)


def first_value(name, shape):
    """Return the initial value of a parameter."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).randn(*shape)
    return (0.7 + 0.05 * drawn if name == "std" else 0.4 * drawn).astype(np.float32)
