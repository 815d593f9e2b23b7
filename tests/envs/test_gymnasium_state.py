from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics

from canter.core.registry import UserError
from canter.envs.gymnasium import GymnasiumEnv, make_gymnasium
from canter.envs.gymnasium.state import StateUnavailable, as_tree, obstacle, restore, snapshot

MUJOCO = ["Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"]
MUJOCO = [f"{name}-v5" for name in [*MUJOCO, "Pusher", "Reacher", "Swimmer", "Walker2d"]]
CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]
MODES = ["NextStep", "SameStep", "Disabled"]


def make(env_id, num_envs=2, mode="SameStep", **kwargs):
    return gymnasium.make_vec(env_id, num_envs, "sync", {"autoreset_mode": mode}, **kwargs)


def capture(env):
    return as_tree(snapshot(env))


def play(env, actions):
    """Everything that the environments showed, with the resets that `Disabled` leaves to us."""
    seen = []
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        done = terminated | truncated
        seen += [obs, reward, terminated, truncated]
        if env.metadata["autoreset_mode"].value == "Disabled" and done.any():
            seen.append(env.reset(options={"reset_mask": done})[0])
    return seen


def same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def check(make_env, before, after):
    first = make_env()
    first.reset(seed=3)
    first.action_space.seed(4)
    ended = play(first, [first.action_space.sample() for _ in range(before)])[-2:]
    state = capture(first)
    actions = [first.action_space.sample() for _ in range(after)]
    expected = play(first, actions)
    second = make_env()
    restore(second, state)
    same([np.asarray(second.action_space.sample()) for _ in range(after)], [np.asarray(a) for a in actions])
    restore(second, state)
    same(play(second, actions), expected)
    first.close()
    second.close()
    return ended


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5", "CartPole-v1", "Pendulum-v1", "Acrobot-v1"])
def test_a_new_environment_continues_bit_for_bit(env_id):
    check(lambda: make(env_id), before=50, after=100)


@pytest.mark.parametrize("env_id", [*MUJOCO, *CLASSIC])
def test_every_known_environment_continues_bit_for_bit(env_id):
    check(lambda: make(env_id, num_envs=1, max_episode_steps=12), before=7, after=15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5"])
def test_also_just_after_an_end(env_id, mode):
    *_, truncated = check(lambda: make(env_id, mode=mode, max_episode_steps=8), before=8, after=20)
    assert truncated.any() or mode == "Disabled"


def test_also_right_after_the_first_reset():
    check(lambda: make("Pendulum-v1"), before=0, after=10)


def test_a_state_is_not_changed_by_going_on():
    env = make("CartPole-v1")
    env.reset(seed=0)
    state = capture(env)
    row = state["envs"][0]["attributes"]["state"].clone()
    play(env, [np.zeros(2, dtype=np.int64)] * 5)
    assert torch.equal(state["envs"][0]["attributes"]["state"], row)


def test_a_state_of_an_earlier_version_with_its_wrapper_is_read():
    env = make("CartPole-v1")
    env.reset(seed=0)
    state = capture(env)
    for single in state["envs"]:
        single["wrappers"].insert(0, ["CheckContract", {}])
    actions = [np.zeros(2, dtype=np.int64)] * 5
    expected = play(env, actions)
    other = make("CartPole-v1")
    restore(other, state)
    same(play(other, actions), expected)


class Own(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, dtype=np.float32), {}


class Counting(gymnasium.Wrapper):
    """Pays the number of steps so far, over all episodes."""

    state_attributes = ("count",)
    count = 0

    def step(self, action):
        self.count += 1
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(self.count), terminated, truncated, info


def test_a_wrapper_takes_part_by_naming_its_attributes():
    check(lambda: make("CartPole-v1", wrappers=[Counting]), before=10, after=10)


class Walk(gymnasium.Env):
    """Has numbers, arrays and a history of its own, besides random numbers."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    state_attributes: Any = ("place", "speed", "steps", "past")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed, self.steps, self.past = 0.0, self.np_random.normal(size=2), 0, {"rewards": []}
        return self.speed.copy(), {}

    def step(self, action):
        self.speed += action * self.np_random.normal(size=2)
        self.place += float(self.speed[0])
        self.steps += 1
        self.past["rewards"].append(self.place)
        return self.speed + len(self.past["rewards"]), self.place, self.steps == 7, False, {}


class Pendulum(InvertedPendulumEnv):
    """A user's MuJoCo environment with a target of its own."""

    state_attributes = ("target",)

    def reset_model(self):
        self.target = self.np_random.uniform(-0.1, 0.1)
        return super().reset_model()

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, float(reward - abs(obs[1] - self.target)), terminated, truncated, info


@pytest.mark.parametrize("own", [Walk, Pendulum])
def test_an_environment_takes_part_by_naming_its_attributes(own):
    def make_env():
        return SyncVectorEnv([own, own], autoreset_mode="SameStep")

    check(make_env, before=10, after=10)


def test_a_subclass_does_not_inherit_the_promise():
    more = type("More", (Pendulum,), {})
    assert "nor does its class declare `state_attributes`" in str(obstacle(SyncVectorEnv([more])))


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        (("place", "log"), "names 'log', a deque, and only plain data"),
        (("objects",), "names 'objects', a ndarray, and only plain data"),
        (("render_mode",), "is for drawing"),
    ],
)
def test_an_attribute_that_cannot_be_saved_is_refused_by_name(attributes, reason):
    class Odd(Walk):
        state_attributes = attributes

        def reset(self, **options):
            self.log, self.objects = deque(), np.array([self], object)
            return super().reset(**options)

    env = GymnasiumEnv(SyncVectorEnv([Odd], autoreset_mode="SameStep"))
    env.reset(0)
    with pytest.raises(StateUnavailable, match=reason):
        env.state_dict()


def test_only_declared_attributes_are_set():
    env = SyncVectorEnv([Walk])
    env.reset(seed=0)
    state = capture(env)
    state["envs"][0]["attributes"]["observation_space"] = 1
    with pytest.raises(UserError, match="sets 'observation_space' of Walk, which is not part of its state"):
        restore(env, state)


@pytest.mark.parametrize(
    "make_env",
    [
        lambda: SyncVectorEnv([Own]),
        lambda: make("CartPole-v1", wrappers=[RecordEpisodeStatistics]),
        lambda: gymnasium.make_vec("CartPole-v1", 2, "vector_entry_point"),
        lambda: gymnasium.wrappers.vector.RecordEpisodeStatistics(make("CartPole-v1")),
        lambda: AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")]),
    ],
    ids=["own", "wrapper", "vector_entry_point", "vector_wrapper", "async"],
)
def test_unknown_parts_are_an_obstacle(make_env):
    env = make_env()
    assert obstacle(env) is not None
    with pytest.raises(StateUnavailable):
        restore(env, {})
    env.close()


def test_a_state_of_other_environments_is_refused():
    env = make("CartPole-v1")
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"of 2 environments, these are 3"):
        restore(make("CartPole-v1", num_envs=3), capture(env))
    with pytest.raises(ValueError, match=r"CartPoleEnv.*not of PendulumEnv"):
        restore(make("Pendulum-v1"), capture(env))


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_the_adapter_continues_bit_for_bit(autoreset):
    def build():
        return make_gymnasium("CartPole-v1", 3, autoreset=autoreset, max_episode_steps=9)

    first, second = build(), build()
    first.reset(seed=1)
    second.reset(seed=2)
    for stop in range(1, 30):
        first.step(torch.ones(3, dtype=torch.int64))
        second.load_state_dict(first.state_dict())
        if stop % 3:
            continue
        here, there = (env.step(torch.zeros(3, dtype=torch.int64)) for env in (first, second))
        for name in ("reward", "terminated", "truncated", "valid"):
            assert torch.equal(getattr(here, name), getattr(there, name))
        assert torch.equal(here.obs["policy"], there.obs["policy"])
        assert (here.final_obs is None) == (there.final_obs is None)


def test_the_adapter_explains_why_a_state_is_unavailable():
    with pytest.raises(StateUnavailable, match=r"the state of Own cannot be saved: Own is neither"):
        GymnasiumEnv(SyncVectorEnv([Own]), autoreset="next_step", env_id="Own").state_dict()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5"])
def test_a_snapshot_is_the_state_at_its_time(env_id):
    if env_id in MUJOCO:
        pytest.importorskip("mujoco")
    env = make_gymnasium(env_id, 2)
    env.reset(0)
    action = torch.zeros(2, dtype=torch.int64) if env_id == "CartPole-v1" else torch.zeros(2, 6)
    env.step(action)
    state, later = env.state_dict(), env.snapshot()
    seen = [env.step(action).obs["policy"].clone() for _ in range(40)]
    assert str(later()) == str(state)
    env.load_state_dict(later())
    assert all(torch.equal(env.step(action).obs["policy"], obs) for obs in seen)
