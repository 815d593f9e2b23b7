"""PettingZoo's parallel environments as rows: deaths, late arrivals, joint state, masks, and what is refused."""

import functools
import sys
import warnings
from typing import ClassVar

import numpy as np
import pettingzoo
import pytest
import torch
from gymnasium import spaces

from canter.algorithms.ppo import PPOConfig
from canter.core.specs import ACTION_MASK, Discrete, Env, Stateful, TensorSpec, UnsupportedSpace
from canter.envs import EnvConfig
from canter.envs.pettingzoo import PettingZooEnv, make_pettingzoo
from canter.envs.wrappers import FiniteHorizon
from canter.training.collector import Collector


class Roll(pettingzoo.ParallelEnv):
    """Agent a lives from step `births[a]` to step `deaths[a]`; the end comes at `limit`.

    Observation (t, agent, own last action), reward 10 * agent + t.
    """

    metadata: ClassVar = {"name": "roll_v0"}

    def __init__(self, births=(0, 0, 0), deaths=(2, 4, 99), limit=6, kind="plain", has_state=False):
        self.possible_agents = ["ant", "bee", "cow"]
        self.births, self.deaths, self.limit, self.kind = births, deaths, limit, kind
        self.agents, self.t, self.taken, self.closed, self.seeds = [], 0, {}, 0, []
        if has_state:
            self.state_space = spaces.Box(-1e6, 1e6, (2,))

    @functools.cache  # noqa: B019 - PettingZoo wants the very same space every time
    def observation_space(self, agent):
        own = spaces.Box(-1e6, 1e6, (3,), np.float32)
        if self.kind == "dict":
            return spaces.Dict({"eyes": own, "action_mask": spaces.MultiBinary(4), "ears": spaces.Discrete(3)})
        return spaces.Box(0, 255, (8, 8, 3), np.uint8) if self.kind == "image" else own

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        return spaces.Discrete(5 if self.kind == "uneven" and agent == "cow" else 4)

    def state(self):
        return np.array([self.t, 100.0 + self.t])

    def _born(self):
        return [agent for agent, birth in zip(self.possible_agents, self.births, strict=True) if birth == self.t]

    def _obs(self, agent):
        number = self.possible_agents.index(agent)
        own = np.array([self.t, number, self.taken.get(agent, -1)], np.float32)
        if self.kind == "dict":
            return {"eyes": own, "action_mask": np.arange(4) <= number, "ears": number}
        return np.full((8, 8, 3), self.t, np.uint8) if self.kind == "image" else own

    def _info(self, agent):
        return {"action_mask": np.array([1, 0, 0, 1])} if self.kind == "mask in info" and agent == "bee" else {}

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.t, self.taken = 0, {}
        self.agents = self._born()
        return {a: self._obs(a) for a in self.agents}, {a: self._info(a) for a in self.agents}

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents), "only those that live act, and all of them"
        self.t += 1
        self.taken = actions
        died = dict(zip(self.possible_agents, self.deaths, strict=True))
        ends = {a: died[a] == self.t for a in self.agents}
        cuts = {a: self.t >= self.limit for a in self.agents}
        reward = {a: 10.0 * self.possible_agents.index(a) + self.t for a in self.agents}
        born = self._born()
        obs = {a: self._obs(a) for a in [*self.agents, *born]}
        infos = {a: self._info(a) for a in obs}
        if self.kind == "hides":
            obs.pop("cow")
        self.agents = [a for a in self.agents if not (ends[a] or cuts[a])] + born
        if self.kind == "loses":
            self.agents.remove("cow")
        return obs, reward, ends, cuts, infos

    def close(self):
        self.closed += 1


def steps(env, count):
    env.reset(seed=0)
    action = torch.arange(env.spec.num_envs) % 4
    return [env.step(action).map(torch.clone) for _ in range(count)]


def column(taken, name):
    return torch.stack([getattr(step, name) for step in taken]).T.tolist()


def test_the_toy_is_a_proper_pettingzoo_environment():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pettingzoo.test import parallel_api_test

        parallel_api_test(Roll(), num_cycles=50)


def test_fits_the_protocol_and_does_not_claim_to_be_resumable():
    env = PettingZooEnv(Roll, 2)
    assert isinstance(env, Env) and not isinstance(env, Stateful)
    assert env.spec.num_envs == 6 and env.spec.num_agents == 3 and env.spec.env_id == "roll_v0"
    assert env.spec.action == Discrete(4)
    assert env.spec.obs == {"policy": TensorSpec((3,)), "critic": TensorSpec((3 * 3 + 3,))}


def test_rows_are_agents_and_dead_ones_wait_for_their_environment():
    taken = steps(PettingZooEnv(Roll, 1), 8)
    t, f = True, False
    assert column(taken, "valid") == [[t, t, f, f, f, f, t, t], [t, t, t, t, f, f, t, t], [t] * 8]
    assert column(taken, "terminated") == [[f, t, f, f, f, f, f, t], [f, f, f, t, f, f, f, f], [f] * 8]
    assert column(taken, "truncated") == [[f] * 8, [f] * 8, [f, f, f, f, f, t, f, f]]
    assert column(taken, "reward") == [
        [1, 2, 0, 0, 0, 0, 1, 2],
        [11, 12, 13, 14, 0, 0, 11, 12],
        [21, 22, 23, 24, 25, 26, 21, 22],
    ]


def test_the_last_observation_is_kept_in_addition_to_the_first_of_the_next_episode():
    taken = steps(PettingZooEnv(Roll, 1), 6)
    assert taken[1].final_obs["policy"][0].tolist() == [2, 0, 0]
    assert taken[2].obs["policy"][0].tolist() == [0, 0, 0]  # a dead agent shows nothing
    assert taken[5].final_obs["policy"][2].tolist() == [6, 2, 2]
    assert taken[5].obs["policy"][:, 0].tolist() == [0, 0, 0]
    assert taken[5].obs["policy"][:, 1].tolist() == [0, 1, 2]


def test_environments_restart_each_in_its_own_time():
    limits = iter((3, 5))
    env = PettingZooEnv(lambda: Roll(deaths=(99, 99, 99), limit=next(limits)), 2)
    assert column(steps(env, 6), "truncated")[::3] == [
        [False, False, True, False, False, True],
        [False, False, False, False, True, False],
    ]


def test_an_agent_that_joins_late_is_valid_from_then_on_with_a_fresh_recurrent_state():
    env = PettingZooEnv(lambda: Roll(births=(0, 0, 2), deaths=(99, 99, 4)), 1)
    algorithm = PPOConfig(horizon=8, epochs=1, num_minibatches=1).build(env.spec, seed=0)
    rollout = Collector(env, algorithm, seed=0).collect()
    assert rollout.valid[:, 2].tolist() == [False, False, True, True, False, False, False, False]
    assert rollout.reset[2, 2] and not rollout.reset[3, 2]
    assert rollout.obs["policy"][2, 2, :2].tolist() == [2, 2]


def test_the_joint_state_is_everybodys_observation_or_the_environments_state():
    step = steps(PettingZooEnv(Roll, 1), 3)[-1]
    alive = [3, 1, 1, 3, 2, 2]
    assert step.obs["critic"].tolist() == [
        [0, 0, 0, *alive, *identity] for identity in ([1, 0, 0], [0, 1, 0], [0, 0, 1])
    ]
    step = steps(PettingZooEnv(lambda: Roll(has_state=True), 2), 1)[-1]
    assert step.obs["critic"][:3].tolist() == [[1, 101, *identity] for identity in ([1, 0, 0], [0, 1, 0], [0, 0, 1])]
    assert "critic" not in PettingZooEnv(Roll, 1, joint_state=False).spec.obs


def test_dicts_masks_and_one_hots_are_treated_as_gymnasiums():
    env = PettingZooEnv(lambda: Roll(kind="dict"), 1)
    assert set(env.spec.obs) == {"eyes", "ears", ACTION_MASK, "critic"}
    assert env.spec.obs["critic"] == TensorSpec((3 * (3 + 3) + 3,))  # the mask is no part of the joint state
    obs = env.reset(seed=0)
    assert obs[ACTION_MASK].tolist() == [[n <= agent for n in range(4)] for agent in range(3)]
    assert obs["ears"].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    for _ in range(3):
        step = env.step(torch.zeros(3, dtype=torch.int64))
    assert step.obs[ACTION_MASK][0].all()  # whoever is dead may do anything


def test_masks_may_come_in_the_infos():
    env = PettingZooEnv(lambda: Roll(kind="mask in info"), 1)
    assert env.reset(seed=0)[ACTION_MASK].tolist() == [[True] * 4, [True, False, False, True], [True] * 4]


def test_a_deadline_that_is_part_of_the_task_terminates():
    last = steps(FiniteHorizon(PettingZooEnv(Roll, 1)), 6)[-1]
    assert last.terminated.tolist() == [False, False, True] and not last.truncated.any()


def test_seeds_are_handed_out_and_repeat():
    made = [[], []]
    for run in made:
        env = PettingZooEnv(lambda run=run: run.append(Roll()) or run[-1], 3)
        env.reset(seed=4)
    seeds = [[env.seeds[-1] for env in run] for run in made]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 3


def test_closing_twice_closes_once():
    made = []
    env = PettingZooEnv(lambda: made.append(Roll()) or made[-1], 2)
    env.close()
    env.close()
    assert [one.closed for one in made] == [1, 1]


def test_agents_learn_from_it():
    env = PettingZooEnv(lambda: Roll(kind="dict"), 2)
    algorithm = PPOConfig(horizon=12, epochs=1, num_minibatches=1).build(env.spec, seed=0)
    collector = Collector(env, algorithm, seed=0)
    for _ in range(2):
        algorithm.update(collector.collect())
        assert collector.read_episodes().env_steps == 2 * 2 * (2 + 4 + 6)
    assert algorithm.model.critic.network.groups == ("critic",)
    assert set(algorithm.model.actor.network.groups) == {"eyes", "ears"}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("uneven", UnsupportedSpace, r"action space of 'ant' is Discrete\(4\) and that of 'cow' is Discrete\(5\)"),
        ("image", UnsupportedSpace, r"joint state would be made of images.*joint_state=False"),
    ],
)
def test_spaces_that_do_not_fit_are_refused(kind, error, message):
    with pytest.raises(error, match=message):
        PettingZooEnv(lambda: Roll(kind=kind), 1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("loses", "roll_v0: agent 'cow' left without being terminated or truncated"),
        ("hides", "roll_v0: step.. returned no observation of agent 'cow', which is alive"),
    ],
)
def test_environments_that_break_the_rules_are_named(kind, message):
    env = PettingZooEnv(lambda: Roll(kind=kind), 1)
    with pytest.raises(ValueError, match=message):
        steps(env, 1)


def test_an_environment_without_a_list_of_agents_is_refused():
    env = Roll()
    del env.possible_agents
    with pytest.raises(ValueError, match="roll_v0 does not declare possible_agents"):
        PettingZooEnv(lambda: env, 1)


def register_roll():
    """Let the id canter/roll-v0 mean it."""
    if "canter/roll-v0" not in pettingzoo.parallel_registry:
        pettingzoo.register(
            "parallel", "canter/roll-v0", lambda max_cycles=6, **kwargs: Roll(limit=max_cycles, **kwargs)
        )


class TestById:
    def test_registered_environments_are_built_by_id(self):
        register_roll()
        config = EnvConfig(
            id="pettingzoo:canter/roll-v0", num_envs=2, options={"has_state": True, "max_episode_steps": 1}
        )
        env = config.build("cpu")
        assert env.spec.num_envs == 6 and env.spec.env_id == "pettingzoo:canter/roll-v0"
        assert env.spec.obs["critic"] == TensorSpec((2 + 3,))
        assert steps(env, 1)[0].truncated.all()

    def test_an_unknown_id_offers_the_nearest(self):
        with pytest.raises(
            ValueError, match=r"unknown PettingZoo environment 'sisl/persuit-v5': did you mean sisl/pursu"
        ):
            make_pettingzoo("sisl/persuit-v5", 1)

    def test_a_missing_dependency_of_pettingzoos_own_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pygame", None)
        with pytest.raises(ImportError, match=r"pip install 'pettingzoo\[sisl\]'.*pygame"):
            make_pettingzoo("sisl/pursuit-v5", 1)


@pytest.mark.filterwarnings("ignore")
class TestItsOwnGames:
    """Only where pygame is installed, which PettingZoo's own games need even when nothing is drawn."""

    @pytest.fixture(autouse=True)
    def pygame(self, monkeypatch):
        monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
        pytest.importorskip("pygame")

    def test_rock_paper_scissors_has_the_right_rewards(self):
        env = make_pettingzoo("classic/rps-v2", 1, max_episode_steps=2)
        assert env.reset(seed=0)["policy"].argmax(-1).tolist() == [3, 3]
        step = env.step(torch.tensor([0, 1]))
        assert step.reward.tolist() == [-1, 1] and step.obs["policy"].argmax(-1).tolist() == [1, 0]
        assert env.step(torch.tensor([0, 1])).truncated.all()

    def test_knights_and_archers_die_one_by_one(self):
        env = make_pettingzoo("butterfly/knights_archers_zombies-v11", 1, max_episode_steps=150, spawn_delay=2)
        algorithm = PPOConfig(horizon=300, epochs=1, num_minibatches=1).build(env.spec, seed=0)
        collector = Collector(env, algorithm, seed=0)
        rollout = collector.collect()
        episodes = collector.read_episodes()
        assert 0 < (~rollout.valid).sum() < rollout.valid.numel() / 2
        assert not rollout.done[~rollout.valid].any()
        assert episodes.env_steps == rollout.valid.sum()
        env.close()
