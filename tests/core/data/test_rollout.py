import pytest
import torch

from canter.core.data.rollout import Rollout, as_sequences
from canter.core.specs import Discrete, EnvSpec, Step, TensorSpec


def test_sequences_of_length_one_are_numbered_t_times_n_plus_n():
    x = torch.arange(12).view(4, 3)
    assert as_sequences(x, 1).tolist() == [list(range(12))]


def test_sequences_are_consecutive_steps_of_one_environment():
    time, env = torch.arange(6).view(6, 1).expand(6, 2), torch.arange(2).expand(6, 2)
    cut = as_sequences({"time": time, "env": env}, 3)
    assert cut["time"].T.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert cut["env"].T.tolist() == [[0] * 3, [1] * 3, [0] * 3, [1] * 3]


def restarts(final_obs, **flags):
    rows = {name: torch.tensor(flags.get(name, [False] * 4)) for name in ("terminated", "truncated")}
    step = Step({}, torch.zeros(4), **rows, valid=torch.tensor(flags["valid"]))
    return step.restarts(final_obs).tolist()


@pytest.mark.parametrize("final_obs", ["separate", "unknown"])
def test_an_episode_starts_after_an_end_or_an_invalid_step(final_obs):
    valid, terminated, truncated = [True, True, False, True], [True, False, False, False], [False, True, False, False]
    assert restarts(final_obs, valid=valid, terminated=terminated, truncated=truncated) == [True, True, True, False]


def test_a_separate_step_with_the_last_observation_belongs_to_the_episode():
    valid, terminated, truncated = [True, True, False, True], [True, False, False, False], [False, True, False, False]
    assert restarts("in_place", valid=valid, terminated=terminated, truncated=truncated) == [False, False, True, False]


def test_a_lost_last_observation_is_not_stored_and_the_next_step_starts_an_episode():
    spec = EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), 2, final_obs="unknown")
    obs, no = {"policy": torch.ones(2, 1)}, torch.zeros(2, dtype=torch.bool)
    rollout = Rollout.allocate(1, obs, (), spec)
    assert rollout.final_obs is None
    step = Step(obs, torch.zeros(2), no, torch.tensor([True, False]), ~no, final_obs=obs)  # what it gives is not read
    rollout.step_writers()[0].write((), step)
    rollout.mark_resets(spec.final_obs)
    assert rollout.reset[1].tolist() == [True, False]


def test_a_misspelt_place_of_the_last_observation_is_refused():
    with pytest.raises(ValueError, match="final_obs='seperate' must be one of separate, in_place, unknown"):
        EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), 2, final_obs="seperate")


def test_groups_are_written_by_name_in_any_order():
    spec = EnvSpec({"a": TensorSpec((1,)), "b": TensorSpec((1,))}, Discrete(2), 1)
    obs = {"a": torch.zeros(1, 1), "b": torch.ones(1, 1)}
    rollout = Rollout.allocate(1, obs, (), spec)
    flags = {name: torch.zeros(1, dtype=torch.bool) for name in ("terminated", "truncated", "valid")}
    turned = {"b": torch.ones(1, 1), "a": torch.zeros(1, 1)}
    rollout.step_writers()[0].write((), Step(obs=turned, reward=torch.zeros(1), final_obs=turned, **flags))
    assert rollout.obs["a"][1] == 0 and rollout.obs["b"][1] == 1
    assert rollout.final_obs["a"][0] == 0 and rollout.final_obs["b"][0] == 1
