"""Self-play: who sits where, who is rated, what a resumed run remembers."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from canter.algorithms.ppo import PPOConfig
from canter.config import TrainConfig
from canter.core.specs import Capturable, Env, MultiDiscrete, Stateful, TensorSpec
from canter.core.struct import tree_map
from canter.envs import EnvConfig
from canter.envs.tensor import tensor_envs
from canter.envs.tensor.base import Outcome, TensorEnv
from canter.envs.tensor.games import ALIVE, REWARD, FoldAgents
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.runs.run_folder import CheckpointConfig, RunFolder
from canter.training.collector import Collector
from canter.training.execution import ExecutionConfig
from canter.training.self_play import FIRST_RATING, RATING_STEP, SelfPlayConfig, SelfPlayEnv
from canter.training.trainer import train

ASKS_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item")
NO_LUCK = 50.0
"""A logit that leaves nothing to chance."""


class NoHostSync(TorchDispatchMode):
    """Fails on every operator that would make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name().removeprefix("aten::").split(".")[0] not in ASKS_HOST, f"{func} asks the host"
        return func(*args, **(kwargs or {}))


class Higher(TensorEnv):
    """The higher number wins a point in each of `rounds`; both see the round and their own seat."""

    def __init__(self, num_envs, rounds=1):
        self.rounds = rounds
        super().__init__("tensor:higher", num_envs, "cpu", {"policy": TensorSpec((2, 2))}, MultiDiscrete((3, 3)))

    def _sample_state(self):
        return {"round": torch.zeros(self.num_envs)}

    def _advance(self, state, action):
        after = {"round": state["round"] + 1}
        won = (action[:, 0] - action[:, 1]).sign().to(torch.float32)
        info = {REWARD: torch.stack((won, -won), 1), ALIVE: torch.ones(self.num_envs, 2, dtype=torch.bool)}
        return Outcome(
            after, won, after["round"] >= self.rounds, info=info, metrics={"drawn": (won == 0).float().mean()}
        )

    def _observe(self, state):
        seat = torch.arange(2.0).expand(self.num_envs, 2)
        return {"policy": torch.stack((state["round"].unsqueeze(1).expand(-1, 2), seat), -1)}


def always(policy, choice):
    """Let a policy choose one action for sure."""
    layer = policy.actor.head
    for parameter in policy.actor.parameters():
        parameter.data.zero_()
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            module.bias.data[choice] = NO_LUCK


def higher(num_envs=8, rounds=1, rnn=None, **settings):
    env = SelfPlayEnv(
        FoldAgents(Higher(num_envs, rounds), 2), SelfPlayConfig(**{"num_opponents": 4} | settings), seed=0
    )
    network = NetworkConfig(hidden=(4,), normalize_obs=False, rnn=rnn)
    config = PPOConfig(horizon=4, sequence_length=2, epochs=1, num_minibatches=1, model=ModelConfig(policy=network))
    return env, config.build(env.spec, seed=0)


def full(value, rows=8):
    return torch.full((rows,), value, dtype=torch.int64)


class TestSeats:
    def test_the_learner_sits_in_turn_and_sees_its_own_seat(self):
        env, algorithm = higher()
        assert isinstance(env, Env) and isinstance(env, Stateful) and isinstance(env, Capturable)
        assert env.spec.num_envs == 8 and env.spec.num_agents == 1
        assert env.reset(seed=0)["policy"][:, 1].tolist() == [0, 1] * 4
        always(algorithm.policy, 1)
        env.adapt(algorithm.policy)
        first = env.step(full(2))
        assert first.reward.tolist() == [1.0] * 8  # whatever the seat, 2 beats 1
        assert first.metrics["drawn"].item() == 0.0  # of all games, not a row of the learner's
        assert env.step(full(0)).reward.tolist() == [-1.0] * 8
        assert env.step(torch.arange(8) % 3).reward.tolist() == [-1, 0, 1, -1, 0, 1, -1, 0]

    def test_opponents_are_those_of_the_pool_and_do_not_learn(self):
        env, algorithm = higher(snapshot_every=2)
        env.reset(seed=0)
        always(algorithm.policy, 0)
        env.adapt(algorithm.policy)
        always(algorithm.policy, 2)  # the learner moves on, its opponents stay
        assert env.step(full(1)).reward.tolist() == [1.0] * 8
        env.adapt(algorithm.policy)
        assert len(env.pool) == 1
        env.adapt(algorithm.policy)
        assert len(env.pool) == 2
        rewards = torch.stack([env.step(full(1)).reward for _ in range(3)])
        # Member 0 of the pool chooses 0 and loses to 1, member 1 chooses 2 and wins; two games for each of four seats.
        expected = [1.0 if member == 0 else -1.0 for member in env._members for _ in range(2)]
        assert rewards.tolist() == [expected] * 3

    def test_without_adapt_there_is_nobody_to_play(self):
        env, _ = higher()
        env.reset()
        with pytest.raises(RuntimeError, match=r"no opponents yet; call adapt\(policy\)"):
            env.step(full(0))

    def test_recurrent_opponents_start_every_game_with_a_reset_state(self):
        env, algorithm = higher(rounds=3, rnn=RNNConfig(hidden=5))
        env.reset(seed=0)
        env.adapt(algorithm.policy)
        memories = []
        for _ in range(6):
            env.step(full(1))
            memories.append(tree_map(torch.clone, env._memory))
        tree_map(lambda a, b: torch.testing.assert_close(a, b), memories[0], memories[3])  # the same round of two games
        assert not torch.allclose(memories[0][0][0], memories[1][0][0])


class TestRatings:
    def play(self, env, action, count):
        for _ in range(count):
            env.step(action)

    def test_wins_raise_the_rating_by_elos_rule(self):
        env, algorithm = higher(num_opponents=1, snapshot_every=100)
        env.reset(seed=0)
        always(algorithm.policy, 1)
        metrics = env.adapt(algorithm.policy)
        assert {name: value.item() for name, value in metrics.items()} == {
            "self_play/elo": FIRST_RATING,
            "self_play/pool_size": 1,
            "self_play/score": 0.5,
        }
        self.play(env, full(2), 3)
        metrics = env.adapt(algorithm.policy)
        first = FIRST_RATING + RATING_STEP * 0.5  # a whole series counts once, and 1/2 was expected
        assert metrics["self_play/elo"].item() == pytest.approx(first)
        assert env.pool.ratings == [pytest.approx(FIRST_RATING - RATING_STEP * 0.5)]
        assert metrics["self_play/score"].item() == 1.0
        self.play(env, torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]), 2)  # six lost, two drawn
        metrics = env.adapt(algorithm.policy)
        expected = 1 / (1 + 10 ** (-RATING_STEP / 400))
        assert metrics["self_play/score"].item() == pytest.approx(1 / 8)
        assert metrics["self_play/elo"].item() == pytest.approx(first + RATING_STEP * (1 / 8 - expected))

    def test_a_game_counts_by_its_return_and_only_at_its_end(self):
        env, algorithm = higher(rounds=3, num_opponents=1, snapshot_every=100)
        env.reset(seed=0)
        always(algorithm.policy, 1)
        env.adapt(algorithm.policy)
        self.play(env, full(2), 2)
        assert env.adapt(algorithm.policy)["self_play/elo"].item() == FIRST_RATING
        self.play(env, full(0), 1)  # two rounds won, one lost
        assert env.adapt(algorithm.policy)["self_play/score"].item() == 1.0

    def test_a_game_that_a_change_of_opponents_interrupts_is_not_rated(self):
        env, algorithm = higher(rounds=3, num_opponents=1, snapshot_every=1)
        env.reset(seed=0)
        always(algorithm.policy, 1)
        env.adapt(algorithm.policy)
        self.play(env, full(2), 2)
        env.adapt(algorithm.policy)  # new opponents
        self.play(env, full(2), 1)
        assert env.adapt(algorithm.policy)["self_play/elo"].item() == FIRST_RATING
        self.play(env, full(2), 3)  # this one began and ended with the same opponent
        assert env.adapt(algorithm.policy)["self_play/elo"].item() > FIRST_RATING


class TestSettings:
    @pytest.mark.parametrize("name", ["snapshot_every", "pool_size", "num_opponents"])
    def test_values_out_of_range_are_refused(self, name):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            SelfPlayConfig(**{name: 0})

    def test_opponents_that_do_not_divide_the_games_are_refused(self):
        with pytest.raises(ValueError, match="num_opponents=8 does not divide num_envs=12; use num_opponents=6"):
            SelfPlayEnv(tensor_envs["rps"](12), SelfPlayConfig(num_opponents=8), seed=0)

    @pytest.mark.parametrize(("name", "agents"), [("rendezvous", 3), ("cartpole", 1)])
    def test_games_without_two_players_are_refused(self, name, agents):
        with pytest.raises(ValueError, match=f"two-player game, and tensor:{name} has num_agents={agents}"):
            SelfPlayEnv(tensor_envs[name](8), SelfPlayConfig(), seed=0)


def config(iterations):
    network = NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=4))
    return TrainConfig(
        env=EnvConfig(id="tensor:rps", num_envs=16, options={"rounds": 3}),
        algorithm=PPOConfig(
            horizon=4, epochs=1, num_minibatches=1, sequence_length=2, model=ModelConfig(policy=network)
        ),
        total_steps=iterations * 64,
        self_play=SelfPlayConfig(snapshot_every=2, num_opponents=4, pool_size=3),
    )


class TestRuns:
    def test_metrics_contain_elo_and_pool(self):
        rows = []
        algorithm = train(config(6), lambda report: rows.append(report.row()))
        assert [row["self_play/pool_size"] for row in rows] == [1, 2, 2, 3, 3, 3]
        assert all(math.isfinite(row["self_play/elo"]) for row in rows)
        assert rows[-1]["env_steps"] == 6 * 64  # the learner's own steps
        assert algorithm.policy.spec.num_envs == 16

    def test_an_interrupted_run_continues_bit_for_bit(self, tmp_path):
        whole = train(config(7), folder=RunFolder(tmp_path / "whole", CheckpointConfig()))
        train(config(3), folder=RunFolder(tmp_path / "parts", CheckpointConfig()))
        parts = train(config(7), folder=RunFolder(tmp_path / "parts", CheckpointConfig()))
        for a, b in zip(whole.model.state_dict().values(), parts.model.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parts")]
        elos = [[line.partition('"self_play/elo": ')[2].partition(",")[0] for line in log] for log in logs]
        assert elos[0] == elos[1] and len(elos[0]) == 7

    def test_games_that_cannot_be_saved_restart_and_the_opponents_stay(self, tmp_path, caplog):
        class OnTheHost:
            def __init__(self):
                games = tensor_envs["rps"](16, rounds=3)
                self.spec, self.reset, self.step, self.close = games.spec, games.reset, games.step, games.close

        rows = []
        for iterations in (3, 5):
            folder = RunFolder(tmp_path / "run", CheckpointConfig())
            train(config(iterations), lambda report: rows.append(report.row()), env=OnTheHost(), folder=folder)
        assert [row["self_play/pool_size"] for row in rows] == [1, 2, 2, 3, 3]
        assert caplog.text.count("all episodes restart") == 1

    def test_an_environment_that_brings_its_own_opponents_needs_no_setting(self):
        rows = []
        env = SelfPlayEnv(tensor_envs["rps"](16, rounds=3), SelfPlayConfig(num_opponents=4), seed=0)
        train(replace(config(2), self_play=None), lambda report: rows.append(report.row()), env=env)
        assert [row["self_play/pool_size"] for row in rows] == [1, 1]

    def test_a_step_never_asks_the_host(self):
        env, algorithm = higher(rounds=3, rnn=RNNConfig(hidden=5))
        collector = Collector(env, algorithm, seed=0)
        env.adapt(algorithm.policy)
        with NoHostSync():
            collector.collect()

    def test_steps_are_captured_only_where_those_of_the_games_may_be(self):
        games = FoldAgents(Higher(8), 2)
        assert isinstance(SelfPlayEnv(games, SelfPlayConfig(num_opponents=4), seed=0), Capturable)

        class OnTheHost:
            spec, reset, step, close = games.spec, games.reset, games.step, games.close

        assert not isinstance(SelfPlayEnv(OnTheHost(), SelfPlayConfig(num_opponents=4), seed=0), Capturable)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_graphs_play_the_same_games(self):
        runs = []
        for mode in ("eager", "graph"):
            execution = ExecutionConfig(mode=mode, tf32=False)
            rows = []
            trained = train(
                replace(config(8), device="cuda", execution=execution), lambda r, rows=rows: rows.append(r.row())
            )
            runs.append((list(trained.model.parameters()), [row["self_play/elo"] for row in rows]))
        for a, b in zip(runs[0][0], runs[1][0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert runs[0][1] == pytest.approx(runs[1][1])
