"""Agents as rows: who is valid when, what dies with an agent, and the in-tree worlds of several agents."""

import pytest
import torch
from test_tensor_envs import NoHostSync

from canter.algorithms.ppo import PPOConfig
from canter.core.specs import Capturable, Continuous, Discrete, Env, MultiDiscrete, Stateful, TensorSpec
from canter.core.struct import tree_map
from canter.envs.tensor import Rendezvous, RockPaperScissors, tensor_envs
from canter.envs.tensor.base import Outcome, TensorEnv
from canter.envs.tensor.games import ALIVE, REWARD, FoldAgents, agent_action
from canter.play.player import Player
from canter.training.collector import Collector

AGENTS = 3


class Doomed(TensorEnv):
    """Agent a of every world dies at step `deaths[a]`; all that live are paid 10 * agent + t, the dead 99."""

    def __init__(self, num_envs=1, deaths=(2, 4, 99), limit=6):
        self.deaths = torch.tensor(deaths)
        obs = {"policy": TensorSpec((AGENTS, 2)), "critic": TensorSpec((AGENTS, 1))}
        super().__init__(
            "tensor:doomed", num_envs, "cpu", obs, MultiDiscrete((5,) * AGENTS), max_episode_steps=limit, durations=True
        )

    def _sample_state(self):
        return {"t": torch.zeros(self.num_envs, dtype=torch.int64), "taken": torch.zeros(self.num_envs, AGENTS)}

    def _advance(self, state, action):
        t = state["t"] + 1
        alive = t.unsqueeze(1) < self.deaths
        was_alive = state["t"].unsqueeze(1) < self.deaths
        reward = torch.where(was_alive, 10.0 * torch.arange(AGENTS) + t.unsqueeze(1), 99.0)
        after = {"t": t, "taken": action.to(torch.float32)}
        return Outcome(after, reward.sum(1), ~alive.any(1), info={REWARD: reward, ALIVE: alive, "duration": t / 2})

    def _observe(self, state):
        t = state["t"].to(torch.float32).view(-1, 1, 1).expand(-1, AGENTS, 1)
        return {"policy": torch.cat((t, state["taken"].unsqueeze(-1)), -1), "critic": t.clone()}


def steps(env, count):
    """`count` steps with action = row number modulo 5."""
    env.reset(seed=0)
    action = torch.arange(env.spec.num_envs) % 5
    return [env.step(action).map(torch.clone) for _ in range(count)]


def column(taken, name):
    return torch.stack([getattr(step, name) for step in taken]).T.tolist()


class TestFolding:
    def test_rows_are_agents_world_by_world(self):
        env = FoldAgents(Doomed(num_envs=2), AGENTS)
        assert env.spec.num_envs == 6 and env.spec.num_agents == AGENTS
        assert env.spec.obs == {"policy": TensorSpec((2,)), "critic": TensorSpec((1,))}
        assert env.spec.action == Discrete(5)
        step = steps(env, 1)[0]
        assert step.obs["policy"][:, 1].tolist() == [0, 1, 2, 3, 4, 0]  # each row's own action came back to it
        assert step.reward.tolist() == [1, 11, 21, 1, 11, 21]
        assert step.info["duration"].tolist() == [0.5] * 6

    def test_a_dead_agent_terminates_once_and_then_waits_for_its_world(self):
        taken = steps(FoldAgents(Doomed(), AGENTS), 8)  # the world is cut after 6 steps, then 2 of the next
        t, f = True, False
        assert column(taken, "valid") == [[t, t, f, f, f, f, t, t], [t, t, t, t, f, f, t, t], [t] * 8]
        assert column(taken, "terminated") == [[f, t, f, f, f, f, f, t], [f, f, f, t, f, f, f, f], [f] * 8]
        assert column(taken, "truncated") == [[f] * 8, [f] * 8, [f, f, f, f, f, t, f, f]]
        assert column(taken, "reward")[0] == [1, 2, 0, 0, 0, 0, 1, 2]  # the world's 99s for the dead are not passed on

    def test_a_world_that_loses_its_last_agent_restarts_at_once(self):
        taken = steps(FoldAgents(Doomed(deaths=(1, 2, 2)), AGENTS), 3)
        assert column(taken, "terminated") == [[True, False, True], [False, True, False], [False, True, False]]
        assert column(taken, "valid") == [[True, False, True], [True] * 3, [True] * 3]
        assert taken[1].final_obs["policy"][:, 0].tolist() == [2, 2, 2]
        assert taken[1].obs["policy"][:, 0].tolist() == [0, 0, 0]

    def test_an_agent_that_dies_when_its_world_is_cut_is_terminated_and_the_others_truncated(self):
        last = steps(FoldAgents(Doomed(deaths=(6, 99, 99)), AGENTS), 6)[-1]
        assert last.terminated.tolist() == [True, False, False]
        assert last.truncated.tolist() == [False, True, True]

    def test_a_saved_state_knows_who_lives(self):
        env, other = FoldAgents(Doomed(), AGENTS), FoldAgents(Doomed(), AGENTS)
        steps(env, 3)
        other.reset(seed=5)
        other.load_state_dict(env.state_dict())
        action = torch.zeros(3, dtype=torch.int64)
        for _ in range(5):
            tree_map(
                lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), env.step(action), other.step(action)
            )

    def test_a_reset_brings_everyone_back(self):
        env = FoldAgents(Doomed(), AGENTS)
        steps(env, 3)
        env.reset(seed=0)
        assert env.step(torch.zeros(3, dtype=torch.int64)).valid.all()

    @pytest.mark.parametrize(
        ("joint", "single"),
        [
            (Continuous((-1.0, 0.0) * 3, (1.0, 2.0) * 3), Continuous((-1.0, 0.0), (1.0, 2.0))),
            (MultiDiscrete((4, 4, 4)), Discrete(4)),
            (MultiDiscrete((2, 5) * 3), MultiDiscrete((2, 5))),
        ],
    )
    def test_a_joint_action_is_shared_out(self, joint, single):
        assert agent_action(joint, 3) == single

    @pytest.mark.parametrize("joint", [MultiDiscrete((4, 4, 5)), Continuous((0.0,) * 4, (1.0,) * 4), Discrete(3)])
    def test_actions_that_cannot_be_shared_out_are_refused(self, joint):
        with pytest.raises(ValueError, match=r"joint action .* must be a MultiDiscrete|is not 3 equal actions"):
            agent_action(joint, 3)

    def test_a_group_without_an_agent_axis_is_refused(self):
        with pytest.raises(ValueError, match=r"observation 'policy' of a world has shape \(4,\), not \(2 agents"):
            FoldAgents(tensor_envs["cartpole"](2), 2)

    def test_an_action_of_the_wrong_length_is_refused(self):
        env = FoldAgents(Doomed(), AGENTS)
        env.reset()
        with pytest.raises(ValueError, match="action has 2 rows, tensor:doomed has 3 agents"):
            env.step(torch.zeros(2, dtype=torch.int64))


def collected(horizon=8, **options):
    env = FoldAgents(Doomed(**options), AGENTS)
    algorithm = PPOConfig(horizon=horizon, epochs=1, num_minibatches=1).build(env.spec, seed=0)
    return env, algorithm, Collector(env, algorithm, seed=0)


class TestAccounts:
    def test_episodes_steps_and_resets_are_those_of_living_agents(self):
        _, _, collector = collected()
        collector.collect()
        episodes = collector.read_episodes()
        # Agent 0 lives 2 steps of the first world and 2 of the second, agent 1 lives 4 of the first.
        assert sorted(zip(episodes.return_, episodes.length, episodes.terminated, strict=True)) == [
            (3.0, 2, True),
            (3.0, 2, True),
            (50.0, 4, True),
            (141.0, 6, False),
        ]
        assert episodes.env_steps == 2 + 4 + 6 + 3 * 2
        assert episodes.resets == 6
        assert episodes.mean_reward == pytest.approx((3 + 50 + 141 + 3 + 11 + 12 + 21 + 22) / 18)

    def test_recurrent_state_is_reset_at_the_first_step_after_death(self):
        _, _, collector = collected()
        rollout = collector.collect()
        reset = rollout.reset[:-1]
        first = rollout.obs["policy"][:-1, :, 0] == 0  # the world's clock shows 0 where an episode begins
        assert reset[first].all()
        assert not reset[~first & rollout.valid].any()

    def test_a_player_receives_the_same_as_a_learner(self):
        env, algorithm, collector = collected(horizon=12)
        rollout = collector.collect()
        turns = Player(algorithm.policy, env, seed=0).steps()
        told = torch.stack([next(turns).reset.clone() for _ in range(12)])
        assert torch.equal(told, rollout.reset[1:])


@pytest.mark.parametrize("name", ["rendezvous", "rps"])
class TestContract:
    def make(self, name, **options):
        return tensor_envs[name](4, **options)

    def act(self, env, seed=0):
        generator = torch.Generator().manual_seed(seed)
        if isinstance(env.spec.action, Discrete):
            return torch.randint(env.spec.action.n, (env.spec.num_envs,), generator=generator)
        return torch.rand(env.spec.num_envs, env.spec.action.dim, generator=generator) * 2 - 1

    def test_fits_the_protocols_and_its_own_spec(self, name):
        env = self.make(name)
        obs = env.reset(seed=0)
        step = env.step(self.act(env))
        assert isinstance(env, Env) and isinstance(env, Stateful) and isinstance(env, Capturable)
        assert env.spec.num_envs == 4 * env.spec.num_agents
        for group in (obs, step.obs, step.final_obs):
            assert {k: (v.shape, v.dtype) for k, v in group.items()} == {
                k: ((env.spec.num_envs, *spec.shape), spec.dtype) for k, spec in env.spec.obs.items()
            }
        assert step.reward.dtype == torch.float32 and step.valid.all()

    def test_a_seed_reproduces_the_steps(self, name):
        runs = []
        for seed in (1, 1, 2):
            env = self.make(name)
            first = env.reset(seed=seed)
            runs.append([first, *(env.step(self.act(env, t)).map(torch.clone) for t in range(60))])
        tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), tuple(runs[0]), tuple(runs[1]))
        same = [torch.equal(a["policy"], b["policy"]) for a, b in zip(runs[0][:1], runs[2][:1], strict=True)]
        assert all(same) == (name == "rps")  # nothing in that game is left to chance

    def test_a_step_never_asks_the_host(self, name):
        env = self.make(name)
        env.reset(seed=0)
        action = self.act(env)
        with NoHostSync():
            env.step(action)


class TestRendezvous:
    def test_the_reward_is_the_mean_closeness_of_living_agents_by_hand(self):
        env = Rendezvous(1, num_agents=3)
        env.reset(seed=0)
        env._state["position"].copy_(torch.tensor([[[0.0, 0.0], [0.3, 0.0], [0.0, 0.9]]]))
        env._state["alive"].copy_(torch.tensor([[True, True, False]]))
        step = env.step(torch.zeros(1, 6))
        assert step.reward.item() == pytest.approx((0.85 + 0.85) / 3)  # the centre of the two living is (0.15, 0)
        assert step.info[REWARD].tolist() == [[step.reward.item()] * 3]

    def test_an_agent_that_leaves_the_arena_dies_and_is_overlooked(self):
        env = tensor_envs["rendezvous"](1, num_agents=3)
        env.reset(seed=0)
        position = torch.tensor([[[0.0, 0.0], [0.97, 0.0], [0.0, 0.5]]])
        env.worlds._state["position"].copy_(position)
        right = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
        step = env.step(right)
        assert step.terminated.tolist() == [False, True, False]
        assert step.obs["policy"][0, :2].tolist() == pytest.approx([0.0, 0.5])  # the next living one is the third
        assert env.step(right).valid.tolist() == [True, False, True]

    def test_each_agent_sees_the_next_one_and_the_critic_everything(self):
        env = tensor_envs["rendezvous"](2, num_agents=3)
        obs = env.reset(seed=3)
        position = env.worlds._state["position"]
        assert torch.allclose(obs["policy"][:, :2].view(2, 3, 2), position.roll(-1, 1) - position)
        joint = obs["critic"].view(2, 3, -1)
        assert torch.equal(joint[..., -3:], torch.eye(3).expand(2, -1, -1))
        assert torch.equal(joint[0, 0, :15], joint[0, 2, :15])
        assert torch.equal(joint[0, 0, :15].view(3, 5)[:, :2], position[0])

    def test_one_agent_alone_is_refused(self):
        with pytest.raises(ValueError, match="num_agents=1 must be at least 2"):
            tensor_envs["rendezvous"](1, num_agents=1)


class TestRockPaperScissors:
    def test_payoffs_and_the_equilibrium_that_the_stakes_imply(self):
        rock, paper, scissors = stakes = (1.0, 3.0, 2.0)
        env = RockPaperScissors(9, stakes=stakes)
        env.reset()
        moves = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        payoff = env.step(moves).info[REWARD]
        table = payoff[:, 0].view(3, 3)
        assert table.tolist() == [[0, -paper, rock], [paper, 0, -scissors], [-rock, scissors, 0]]
        assert torch.equal(payoff[:, 0], -payoff[:, 1])
        equilibrium = torch.tensor([scissors, rock, paper]) / sum(stakes)
        assert (table @ equilibrium).abs().max() < 1e-6

    def test_a_player_sees_the_last_move_of_the_other(self):
        env = tensor_envs["rps"](1, rounds=2)
        assert env.reset()["policy"].tolist() == [[0, 0, 0, 1]] * 2
        step = env.step(torch.tensor([0, 2]))
        assert step.obs["policy"].tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
        assert not step.terminated.any()
        assert env.step(torch.tensor([0, 2])).terminated.all()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rounds": 0}, "rounds=0 must be"),
            ({"stakes": (1, 2)}, r"stakes=\(1, 2\)"),
            ({"stakes": (1, 0, 1)}, "positive"),
        ],
    )
    def test_games_that_make_no_sense_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            tensor_envs["rps"](1, **options)
