"""Somebody from Stable-Baselines3: their words are answered, and their script has the same lines here."""

import json

import gymnasium
import numpy as np
import pytest

import canter


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["--lr", "3e-4"], "--algorithm.optimizer.learning-rate"),
        (["--learning-rate", "3e-4"], "--algorithm.optimizer.learning-rate"),
        (["--n-steps", "2048"], "--algorithm.horizon"),
        (["--batch-size", "64"], "--algorithm.num-minibatches"),
        (["--ent-coef", "0.01"], "--algorithm.entropy-coef"),
        (["--n-timesteps", "1000"], "--total-steps"),
    ],
)
def test_their_flags_are_answered_with_ours(user, theirs, ours):
    code, told = user.tries("train", "Pendulum-v1", *theirs)
    assert code == 2 and ours in told, told


def test_their_script_line_by_line(user):
    # env = make_vec_env("CartPole-v1", n_envs=4); model = PPO("MlpPolicy", env, n_steps=128, batch_size=128, seed=1)
    env = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    settings = {"algorithm": {"horizon": 128, "num_minibatches": 4, "gamma": 0.98}, "seed": 1, "console": "quiet"}
    # model.learn(total_timesteps=4096)
    model = canter.train(env=env, total_steps=4096, **settings)
    # model.save("ppo_cartpole"); model = PPO.load("ppo_cartpole")
    model.policy.save("ppo_cartpole.safetensors")
    policy = canter.load("ppo_cartpole.safetensors")
    # obs = env.reset(); action, _ = model.predict(obs, deterministic=True)
    obs, _ = env.reset(seed=0)
    action, _ = policy.predict(obs, deterministic=True)
    assert action.shape == (4,) and np.array_equal(action, model.predict(obs)[0])
    env.close()
    # mean_reward, std_reward = evaluate_policy(model, env, n_eval_episodes=10)
    found = canter.evaluate(policy, "CartPole-v1", episodes=10)
    assert found.mean > 20 and found.std >= 0


def test_their_callbacks_are_settings(user):
    # EvalCallback(eval_env, eval_freq=...), StopTrainingOnRewardThreshold, CheckpointCallback
    flags = ["--evaluate.every", "2048", "--evaluate.episodes", "4", "--checkpoints.best-by", "evaluation"]
    flags += ["--until.mean-return", "40", "--checkpoints.save-every", "2", "--console", "lines"]
    told = user.types("train", "CartPole-v1", "--total-steps", "40000", *flags, "--name", "mine")
    assert "ended by until.mean_return" in told
    rows = [json.loads(line) for line in (user.folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert any("eval/return" in row for row in rows)
    assert (user.folder / "runs/mine/policies/best.safetensors").is_file()
    assert "eval" in (user.folder / "runs/mine/report.html").read_text()
