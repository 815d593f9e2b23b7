"""Gymnasium adapter: every kind of space, and action masks from both sources."""

import gymnasium
import numpy as np
import pytest
import torch
from counter_env import MODES, Counter, counters
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

from canter.core.specs import Continuous, Discrete, MultiDiscrete, TensorSpec, UnsupportedSpace
from canter.envs.gymnasium import GymnasiumEnv, make_gymnasium


class Echo(gymnasium.Env):
    """Any spaces; remembers the last action."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space
        self.action = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.action = action
        return self.observation_space.sample(), 1, False, False, {}


def echo(observation_space=None, action_space=None, num_envs=2):
    observation_space = spaces.Box(-1, 1, (3,)) if observation_space is None else observation_space
    action_space = spaces.Discrete(2) if action_space is None else action_space
    return SyncVectorEnv([lambda: Echo(observation_space, action_space)] * num_envs)


@pytest.mark.parametrize(
    ("space", "spec", "action", "received"),
    [
        (spaces.Discrete(3, start=5), Discrete(3), [0, 2], [5, 7]),
        (
            spaces.MultiDiscrete([2, 3], start=[10, -1]),
            MultiDiscrete((2, 3)),
            [[0, 0], [1, 2]],
            [[10, -1], [11, 1]],
        ),
        (
            spaces.MultiDiscrete([[2, 3], [4, 5]]),
            MultiDiscrete((2, 3, 4, 5)),
            [[0, 1, 2, 3], [1, 2, 3, 4]],
            [[[0, 1], [2, 3]], [[1, 2], [3, 4]]],
        ),
        (spaces.MultiBinary(3), MultiDiscrete((2, 2, 2)), [[0, 1, 1], [1, 0, 0]], [[0, 1, 1], [1, 0, 0]]),
        (
            spaces.Box(-2, np.array([[1.0, 2.0]]), dtype=np.float64),
            Continuous((-2.0, -2.0), (1.0, 2.0)),
            [[0.5, 1.5], [-2.0, 2.0]],
            [[[0.5, 1.5]], [[-2.0, 2.0]]],
        ),
        (spaces.Box(-3, 3, (1,), np.int32), Continuous((-3.0,), (3.0,)), [[0.7], [-2.6]], [[1], [-3]]),
        (spaces.Box(-np.inf, np.inf, (1,)), Continuous((-np.inf,), (np.inf,)), [[1e6], [0.0]], [[1e6], [0.0]]),
    ],
)
def test_actions_arrive_as_their_space_wants_them(space, spec, action, received):
    vector = echo(action_space=space)
    env = GymnasiumEnv(vector)
    assert env.spec.action == spec
    env.reset()
    env.step(torch.tensor(action))
    got = [single.action for single in vector.envs]
    assert np.array_equal(np.array(got), np.array(received))
    assert np.asarray(got[0]).dtype == space.dtype


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_tuple_of_choices_arrives_as_a_tuple(vectorization):
    gymnasium.register("Pair-v0", Pair)
    try:
        env = make_gymnasium("Pair-v0", 2, vectorization=vectorization)
        assert env.spec.action == MultiDiscrete((3, 2))
        env.reset(seed=0)
        step = env.step(torch.tensor([[2, 0], [0, 1]]))
        env.close()
    finally:
        del gymnasium.registry["Pair-v0"]
    assert step.obs["policy"].tolist() == [[2.0, 5.0], [0.0, 6.0]]


class Pair(gymnasium.Env):
    """Shows the action, a Tuple of choices of which the second counts from 5."""

    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2, start=5)])

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert isinstance(action, tuple) and self.action_space.contains(action)
        return np.array(action, np.float32), 0.0, False, False, {}


def test_bounds_that_float32_cannot_hold_are_rounded_inwards():
    spec = GymnasiumEnv(echo(action_space=spaces.Box(-0.1, 0.4, (1,), np.float64))).spec.action
    assert -0.1 <= spec.low[0] < -0.0999999 and 0.3999999 < spec.high[0] <= 0.4
    assert np.float32(spec.high[0]) == spec.high[0]


@pytest.mark.parametrize(
    ("space", "specs"),
    [
        (spaces.Box(-1, 1, (2, 3), np.float64), {"policy": TensorSpec((2, 3))}),
        (spaces.Box(-1, 1, (), np.float64), {"policy": TensorSpec((1,))}),
        (spaces.Box(0, 255, (3, 8, 8), np.uint8), {"policy": TensorSpec((3, 8, 8), torch.uint8)}),
        (spaces.Box(0, 255, (8,), np.uint8), {"policy": TensorSpec((8,))}),
        (spaces.Discrete(4, start=2), {"policy": TensorSpec((4,))}),
        (spaces.MultiDiscrete([2, 3], start=[1, 5]), {"policy": TensorSpec((5,))}),
        (spaces.MultiBinary(3), {"policy": TensorSpec((3,))}),
        (
            spaces.Dict(b=spaces.Box(0, 1, (2,)), a=spaces.Dict(x=spaces.Discrete(2), y=spaces.Box(0, 1, (1,)))),
            {"a/x": TensorSpec((2,)), "a/y": TensorSpec((1,)), "b": TensorSpec((2,))},
        ),
    ],
)
def test_observations_match_their_spec(space, specs):
    env = GymnasiumEnv(echo(space))
    assert env.spec.obs == specs
    for obs in (env.reset(), env.step(torch.zeros(2, dtype=torch.int64)).obs):
        assert {key: TensorSpec(tuple(v.shape[1:]), v.dtype) for key, v in obs.items()} == specs


def test_choices_are_observed_one_hot():
    class Fixed(Echo):
        def reset(self, *, seed=None, options=None):
            return {"one": np.int64(7), "two": np.array([1, 7])}, {}

    space = spaces.Dict(one=spaces.Discrete(3, start=5), two=spaces.MultiDiscrete([2, 3], start=[0, 5]))
    env = GymnasiumEnv(SyncVectorEnv([lambda: Fixed(space, spaces.Discrete(2))]))
    obs = env.reset()
    assert obs["one"].tolist() == [[0, 0, 1]] and obs["two"].tolist() == [[0, 1, 0, 0, 1]]


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_last_observation_of_a_dict_keeps_its_groups(mode):
    class Grouped(gymnasium.ObservationWrapper):
        observation_space = spaces.Dict(
            a=spaces.Dict(x=spaces.Box(-np.inf, np.inf, (1,), np.float64)),
            b=spaces.Box(-np.inf, np.inf, (2,), np.float64),
        )

        def observation(self, observation):
            return {"a": {"x": observation[:1]}, "b": observation}

    maker = lambda: Grouped(Counter((2,)))  # noqa: E731
    env = GymnasiumEnv(SyncVectorEnv([maker], autoreset_mode=AutoresetMode[mode.upper()]))
    env.reset(seed=0)
    env.step(torch.tensor([1]))
    step = env.step(torch.tensor([3]))
    assert step.final_obs["a/x"].tolist() == [[102]] and step.final_obs["b"].tolist() == [[102, 3]]
    assert step.obs["a/x"].tolist() == [[200]]


@pytest.mark.parametrize(
    ("observation_space", "action_space", "named"),
    [
        (spaces.Tuple([spaces.Discrete(2)]), None, "Tuple"),
        (spaces.Dict(words=spaces.Text(5)), None, "words"),
        (None, spaces.Dict(a=spaces.Discrete(2)), "Dict"),
        (None, spaces.Tuple([spaces.Discrete(2)]), "Tuple"),
        (spaces.Dict(action_mask=spaces.MultiBinary(3)), None, "action_mask"),
    ],
)
def test_unsupported_spaces_are_named(observation_space, action_space, named):
    with pytest.raises(UnsupportedSpace, match=named):
        GymnasiumEnv(echo(observation_space, action_space))


def test_observation_of_another_shape_than_promised_is_refused():
    class Liar(VectorWrapper):
        def reset(self, **kwargs):
            obs, info = self.env.reset(**kwargs)
            return obs[:, :1], info

    with pytest.raises(ValueError, match="its space promises"):
        GymnasiumEnv(Liar(counters("same_step"))).reset()


# Masks


@pytest.mark.parametrize("mode", MODES)
def test_mask_in_info_belongs_to_the_observation_it_comes_with(mode):
    env = GymnasiumEnv(counters(mode, schedules=((2,), (9,)), mask="growing"))
    assert env.spec.obs["action_mask"] == TensorSpec((4,), torch.bool)
    assert env.reset()["action_mask"].sum(1).tolist() == [1, 1]
    counts, final = [], []
    for _ in range(3):
        step = env.step(torch.zeros(2, dtype=torch.int64))
        counts.append(step.obs["action_mask"].sum(1).tolist())
        final.append(None if step.final_obs is None else step.final_obs["action_mask"][0].sum().item())
    if mode == "next_step":
        assert counts == [[2, 2], [3, 3], [1, 4]] and final == [None] * 3
    else:
        assert counts == [[2, 2], [1, 3], [2, 4]] and final == [None, 3, None]


class MaskInObs(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        mask = spaces.Box(0, 1, (4,), np.int8)
        self.observation_space = spaces.Dict(policy=env.observation_space, action_mask=mask)

    def observation(self, observation):
        allowed = (np.arange(4) <= self.unwrapped.t).astype(np.int8)
        return {"policy": observation, "action_mask": allowed}


@pytest.mark.parametrize("mode", MODES)
def test_mask_in_the_observation(mode):
    makers = [lambda: MaskInObs(Counter((2,)))]
    env = GymnasiumEnv(SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()]))
    assert env.spec.obs == {"policy": TensorSpec((2,)), "action_mask": TensorSpec((4,), torch.bool)}
    assert env.reset()["action_mask"].tolist() == [[True, False, False, False]]
    env.step(torch.tensor([0]))
    step = env.step(torch.tensor([0]))
    last = step.final_obs if env.spec.final_obs == "separate" else step.obs
    assert last["action_mask"].tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("mode", MODES)
def test_finished_game_without_legal_move_is_fine_but_a_running_one_is_not(mode):
    def over(env):
        return np.full(4, env.t < 2)

    env = GymnasiumEnv(counters(mode, schedules=((2,),), mask=over))
    env.reset()
    for _ in range(6):
        step = env.step(torch.tensor([0]))
        assert step.obs["action_mask"].any()
        assert step.final_obs is None or step.final_obs["action_mask"].all()
    env = GymnasiumEnv(counters(mode, schedules=((2,), (9,)), mask=over))
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="environment 1 "):
        env.step(torch.zeros(2, dtype=torch.int64))


def test_rows_without_a_mask_allow_everything():
    makers = [lambda: Counter((9,), mask="growing"), lambda: Counter((9,))]
    env = GymnasiumEnv(SyncVectorEnv(makers))
    assert env.reset()["action_mask"].sum(1).tolist() == [1, 4]


def test_mask_of_several_choices_needs_one_allowed_action_in_each():
    class Masked(Echo):
        def reset(self, *, seed=None, options=None):
            obs, _ = super().reset(seed=seed)
            return obs, {"action_mask": list(self.mask)}

    def make(mask):
        def maker():
            env = Masked(spaces.Box(-1, 1, (1,)), spaces.MultiDiscrete([2, 3]))
            env.mask = mask
            return env

        return GymnasiumEnv(SyncVectorEnv([maker]))

    env = make([1, 0, 0, 0, 1])
    assert env.spec.obs["action_mask"].shape == (5,)
    assert env.reset()["action_mask"].tolist() == [[True, False, False, False, True]]
    with pytest.raises(ValueError, match="environment 0 allows no action"):
        make([1, 1, 0, 0, 0]).reset()
