"""Small settings in the source libraries' layout, as plain data."""

from copy import deepcopy

from canter.compat import ImportRefused, import_config
from canter.core.plain import ConfigError

RL_GAMES = {
    "params": {
        "seed": 7,
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": {
            "name": "actor_critic",
            "separate": False,
            "space": {
                "continuous": {
                    "mu_activation": "None",
                    "sigma_activation": "None",
                    "mu_init": {"name": "default"},
                    "sigma_init": {"name": "const_initializer", "val": 0},
                    "fixed_sigma": True,
                }
            },
            "mlp": {
                "units": [32, 16],
                "activation": "elu",
                "initializer": {"name": "default"},
                "regularizer": {"name": "None"},
            },
        },
        "config": {
            "name": "small",
            "env_name": "Pendulum-v1",
            "reward_shaper": {"scale_value": 0.1},
            "normalize_input": True,
            "normalize_value": True,
            "normalize_advantage": True,
            "num_actors": 8,
            "gamma": 0.98,
            "tau": 0.9,
            "e_clip": 0.3,
            "entropy_coef": 0.01,
            "learning_rate": "5e-4",
            "lr_schedule": "adaptive",
            "kl_threshold": 0.008,
            "critic_coef": 4,
            "clip_value": True,
            "bounds_loss_coef": 0.001,
            "grad_norm": 0.7,
            "truncate_grads": True,
            "horizon_length": 16,
            "minibatch_size": 32,
            "mini_epochs": 3,
            "max_epochs": 2,
        },
    }
}

RSL_RL = {
    "seed": 3,
    "num_steps_per_env": 8,
    "max_iterations": 2,
    "save_interval": 1,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "actor": {
        "class_name": "MLPModel",
        "hidden_dims": [32, 16],
        "activation": "elu",
        "obs_normalization": True,
        "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "scalar"},
    },
    "critic": {"class_name": "MLPModel", "hidden_dims": [24], "activation": "tanh", "obs_normalization": False},
    "algorithm": {
        "class_name": "PPO",
        "value_loss_coef": 1.5,
        "clip_param": 0.25,
        "entropy_coef": 0.01,
        "num_learning_epochs": 4,
        "num_mini_batches": 2,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "gamma": 0.97,
        "lam": 0.94,
        "desired_kl": 0.02,
        "max_grad_norm": 0.8,
    },
}

POLICY_ALGORITHM = {key: value for key, value in RSL_RL["algorithm"].items()}
OLD_POLICY = {
    "init_noise_std": 0.5,
    "actor_hidden_dims": [32, 16],
    "critic_hidden_dims": [24],
    "activation": "elu",
}
GENERATIONS = {
    1: {
        "runner": {
            "policy_class_name": "ActorCritic",
            "algorithm_class_name": "PPO",
            "num_steps_per_env": 8,
            "max_iterations": 2,
            "save_interval": 1,
            "experiment_name": "old",
            "resume": False,
        },
        "policy": OLD_POLICY,
        "algorithm": {key: value for key, value in POLICY_ALGORITHM.items() if key != "class_name"},
        "seed": 3,
    },
    2: {
        "num_steps_per_env": 8,
        "max_iterations": 2,
        "save_interval": 1,
        "empirical_normalization": True,
        "policy": {"class_name": "ActorCritic", **OLD_POLICY},
        "algorithm": POLICY_ALGORITHM,
    },
    3: {
        "num_steps_per_env": 8,
        "max_iterations": 2,
        "save_interval": 1,
        "obs_groups": {"policy": ["policy"], "critic": ["policy"]},
        "policy": {
            "class_name": "ActorCritic",
            **OLD_POLICY,
            "actor_obs_normalization": True,
            "critic_obs_normalization": True,
            "noise_std_type": "log",
        },
        "algorithm": POLICY_ALGORITHM,
    },
    4: {
        "num_steps_per_env": 8,
        "max_iterations": 2,
        "save_interval": 1,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {
            "class_name": "MLPModel",
            "hidden_dims": [32, 16],
            "activation": "elu",
            "obs_normalization": True,
            "stochastic": True,
            "init_noise_std": 0.5,
            "noise_std_type": "scalar",
        },
        "critic": {"class_name": "MLPModel", "hidden_dims": [24], "activation": "elu", "stochastic": False},
        "algorithm": POLICY_ALGORITHM,
    },
    5: RSL_RL,
}


def rl_games(**changes):
    """`RL_GAMES` with values put at dotted paths below params; None as a value removes the key."""
    return changed(RL_GAMES, {f"params.{key}": value for key, value in changes.items()})


REMOVED = object()


def changed(tree, changes):
    """A copy of a tree with values at dotted paths (`__` stands for a dot)."""
    tree = deepcopy(tree)
    for path, value in changes.items():
        *parents, last = path.replace("__", ".").split(".")
        here = tree
        for part in parents:
            here = here.setdefault(part, {})
        if value is REMOVED:
            here.pop(last, None)
        else:
            here[last] = value
    return tree


def _paths(tree, at=()):
    """Every key below a tree, as a path."""
    for key, value in tree.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from _paths(value, (*at, key))


def silent(tree, but=(), **options):
    """Sections in which an unknown key is not refused by its name; `but`: those that the library does not read."""
    found = []
    for path in _paths(tree):
        if not isinstance(value_at(tree, path), dict) or path[-1] in but:
            continue
        key = ".".join((*path, "misspelt"))
        try:
            import_config(changed(tree, {key: 1}), **options)
            found.append(key)
        except ImportRefused as refused:
            found += [] if key in [entry.key for entry in refused.report.of("refused")] else [key]
    return found


def crashes(tree, **options):
    """Keys with a value that ends in something else than a refusal."""
    found = []
    for path in _paths(tree):
        for value in ("abc", {"a": 1}, [1], [], None, -1, 0, True, "${x.y}", 3.7, float("nan"), float("inf")):
            try:
                import_config(changed(tree, {".".join(path): value}), **options)
            except ConfigError:
                continue
            except Exception as error:
                found.append((path, value, repr(error)))
    return found


def value_at(tree, path):
    """Return the value at a path."""
    return value_at(tree[path[0]], path[1:]) if path else tree
