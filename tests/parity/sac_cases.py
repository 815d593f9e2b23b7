"""Settings and batches of the SAC updates in which Canter and rl_games must agree; NumPy only, as both read it."""

import numpy as np

OBS, ACTIONS, ROWS = 3, 2, 16
CASES = {
    "plain": {"seed": 1, "bounds": ([-1.0, -1.0], [1.0, 1.0]), "config": {"learnable_temperature": False}},
    "normalised": {"seed": 2, "bounds": ([-1.0, -1.0], [1.0, 1.0]), "config": {"normalize_input": True}},
    "bounds": {"seed": 3, "bounds": ([-2.0, 0.0], [2.0, 3.0]), "config": {"normalize_input": True}},
}
"""In the last one critics read actions in other units here than there, so their layers learn at another rate."""


def settings(case):
    """rl_games' settings of a case."""
    network = {
        "name": "soft_actor_critic",
        "separate": True,
        "space": {"continuous": None},
        "mlp": {"units": [6, 4], "activation": "relu", "initializer": {"name": "default"}},
        "log_std_bounds": [-5, 2],
    }
    config = {
        "name": "small",
        "env_name": "small",
        "device": "cpu",
        "num_actors": 4,
        "num_steps_per_episode": 1,
        "max_epochs": 10,
        "reward_shaper": {"scale_value": 1},
        "gamma": 0.97,
        "init_alpha": 0.4,
        "learnable_temperature": True,
        "batch_size": ROWS,
        "replay_buffer_size": 256,
        "num_warmup_steps": 8,
        "actor_lr": 1e-2,
        "critic_lr": 1e-2,
        "alpha_lr": 1e-2,
        "critic_grad_clip": 0.5,
        "policy_frequency": 2,
        "critic_tau": 0.1,
    } | CASES[case]["config"]
    model = {"name": "soft_actor_critic"}
    return {"params": {"seed": 1, "algo": {"name": "sac"}, "model": model, "network": network, "config": config}}


def batches(number):
    """Return the samples of an update as the replay buffer of rl_games has them, and noise `[2, B, A]`."""
    random = np.random.RandomState(number)
    action = np.tanh(random.randn(ROWS, ACTIONS))
    batch = {
        "obs": random.randn(ROWS, OBS) * 2 + 1,
        "action": action,
        "reward": random.randn(ROWS, 1),
        "next_obs": random.randn(ROWS, OBS) * 2 + 1,
    }
    batch = {name: array.astype(np.float32) for name, array in batch.items()}
    noise = random.randn(2, ROWS, ACTIONS).astype(np.float32)
    return batch | {"done": random.rand(ROWS, 1) < 0.2, "noise": noise}
