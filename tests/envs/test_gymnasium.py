"""Gymnasium adapter: one contract from three reset modes, memory, seeds, making by id."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from counter_env import MODES, Counter, counters, real_rows
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorWrapper
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.core.specs import Continuous, Env, TensorSpec
from canter.envs.gymnasium import GymnasiumEnv, env_seeds, make_gymnasium
from canter.envs.wrappers import FiniteHorizon


@pytest.mark.parametrize("mode", MODES)
def test_transitions_are_the_hand_computed_ones_in_every_mode(mode):
    env = GymnasiumEnv(counters(mode, schedules=((2,),)))
    assert isinstance(env, Env)
    assert env.spec.final_obs == ("in_place" if mode == "next_step" else "separate")
    rows, taken = real_rows(env, 4)
    assert rows == [
        [
            ([100.0, -1.0], 0, 101.0, (False, False), [101.0, 0.0]),
            ([101.0, 0.0], 1, 102.0, (False, True), [102.0, 1.0]),
            ([200.0, -1.0], 2, 201.0, (False, False), [201.0, 2.0]),
            ([201.0, 2.0], 3, 202.0, (False, True), [202.0, 3.0]),
        ]
    ]
    assert taken == (5 if mode == "next_step" else 4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4), st.sampled_from(MODES))
def test_any_schedule_has_the_same_transitions_in_every_mode(schedules, mode):
    reference, _ = real_rows(GymnasiumEnv(counters("disabled", schedules)), 15)
    assert real_rows(GymnasiumEnv(counters(mode, schedules)), 15)[0] == reference


@pytest.mark.parametrize("mode", MODES)
def test_termination_wins_over_truncation(mode):
    rows, _ = real_rows(GymnasiumEnv(counters(mode, ends="both")), 10)
    flags = {flags for row in rows for *_, flags, _ in row}
    assert flags == {(False, False), (True, False)}


@pytest.mark.parametrize("mode", MODES)
def test_deadline_of_a_finite_horizon_task_is_terminal(mode):
    env = FiniteHorizon(GymnasiumEnv(counters(mode)))
    flags = {flags for row in real_rows(env, 10)[0] for *_, flags, _ in row}
    assert flags == {(False, False), (True, False)}
    assert env.spec.truncates is False


def test_asynchronous_environments_return_the_same_transitions_and_close_twice():
    reference, _ = real_rows(GymnasiumEnv(counters("same_step")), 12)
    for mode in MODES:
        env = GymnasiumEnv(counters(mode, vector=AsyncVectorEnv))
        assert real_rows(env, 12)[0] == reference
        env.close()
        env.close()


def test_asynchronous_without_shared_memory_is_refused_where_it_loses_steps():
    vector = AsyncVectorEnv([Counter], shared_memory=False)
    with pytest.raises(ValueError, match="shared_memory=True"):
        GymnasiumEnv(vector)
    vector.close()


def test_explicit_reset_drops_the_pending_filler_row():
    env = GymnasiumEnv(counters("next_step", schedules=((2,),)))
    env.reset()
    for _ in range(2):
        step = env.step(torch.zeros(1, dtype=torch.int64))
    assert step.truncated.all()
    env.reset()
    assert env.step(torch.zeros(1, dtype=torch.int64)).valid.all()


# Memory


@pytest.mark.parametrize("mode", MODES)
def test_environment_that_reuses_its_array_does_no_harm(mode):
    gymnasium.register("Scribbling-v0", lambda: Counter((3,), scribble=True))
    try:
        env = make_gymnasium("Scribbling-v0", 2, autoreset=mode, disable_env_checker=True)
    finally:
        del gymnasium.registry["Scribbling-v0"]
    assert real_rows(env, 7)[0] == real_rows(GymnasiumEnv(counters(mode, ((3,), (3,)))), 7)[0]


class Scribbling(VectorWrapper):
    """Overwrites what it returned before, as soon as it is called again."""

    given = ()

    def step(self, actions):
        for array in self.given:
            array[...] = 77
        out = self.env.step(actions)
        actions[...] = 1
        self.given = out[:4]
        return out


def test_arrays_changed_after_the_step_do_not_change_tensors():
    vector = Scribbling(counters("same_step"))
    env = GymnasiumEnv(vector)
    env.reset(seed=0)
    action = torch.zeros(2, dtype=torch.int64)
    step = env.step(action)
    for array in vector.given:
        array[...] = 55
    assert step.obs["policy"][:, 0].tolist() == [101, 101] and step.reward.tolist() == [101, 101]
    assert not step.terminated.any() and not step.truncated.any()
    assert action.tolist() == [0, 0]


def test_numbers_become_float32_and_follow_the_device():
    env = GymnasiumEnv(counters("same_step", schedules=((1,),)), device="meta", info_keys=("clock",))
    step = env.step(torch.zeros(1, dtype=torch.int64))
    assert env.spec.device.type == "meta"
    for tensor in (step.obs["policy"], step.final_obs["policy"], step.reward, step.info["clock"]):
        assert tensor.dtype == torch.float32 and tensor.device.type == "meta"
    assert GymnasiumEnv(counters("same_step")).reset()["policy"].dtype == torch.float32


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_info_of_ended_rows_is_the_ended_episodes(mode):
    env = GymnasiumEnv(counters(mode, schedules=((2,), (9,))), info_keys=("clock", "absent"))
    env.reset()
    clocks = [env.step(torch.zeros(2, dtype=torch.int64)).info["clock"].tolist() for _ in range(3)]
    assert clocks == [[1, 1], [2, 2], [1, 3]]
    assert env.step(torch.zeros(2, dtype=torch.int64)).info["absent"].tolist() == [0, 0]


def test_info_that_only_the_new_episode_has_is_not_taken_for_the_ended_one():
    class Reborn(gymnasium.Wrapper):
        def reset(self, **kwargs):
            obs, info = self.env.reset(**kwargs)
            return obs, {**info, "born": 1.0}

    vector = SyncVectorEnv([lambda: Reborn(Counter((1,)))], autoreset_mode="SameStep")
    env = GymnasiumEnv(vector, info_keys=("born",))
    env.reset()
    assert env.step(torch.tensor([0])).info["born"].tolist() == [0]


def test_rows_that_were_not_reset_keep_their_observation():
    class Careless(VectorWrapper):
        def reset(self, *, seed=None, options=None):
            kept = None if options is None else ~options["reset_mask"]
            obs, info = self.env.reset(seed=seed, options=options)
            if kept is not None:
                obs[kept] = np.nan
            return obs, info

    env = GymnasiumEnv(Careless(counters("disabled")))
    assert real_rows(env, 12)[0] == real_rows(GymnasiumEnv(counters("disabled")), 12)[0]


# Seeds


def test_seeds_are_distinct_and_neighbours_share_none():
    everything = [seed for base in range(50) for seed in env_seeds(base, 64)]
    assert len(set(everything)) == 50 * 64
    assert env_seeds(3, 4) == np.random.SeedSequence(3).generate_state(4).tolist()
    assert len(set(env_seeds(0, 300, bits=9))) == 300


def test_seeded_resets_repeat_and_differ_between_environments():
    env = make_gymnasium("Pendulum-v1", 3)
    first = env.reset(seed=5)["policy"].clone()
    assert torch.equal(env.reset(seed=5)["policy"], first)
    assert not torch.equal(env.reset(seed=6)["policy"], first)
    assert len({tuple(row) for row in first.tolist()}) == 3
    unseeded = env.reset()["policy"].clone()
    assert not torch.equal(env.reset()["policy"], unseeded)


# Making


def test_own_vector_implementation_with_one_generator():
    env = make_gymnasium("CartPole-v1", 3, vectorization="vector_entry_point")
    assert env.spec.final_obs == "in_place" and env.spec.truncates is True
    first = env.reset(seed=1)["policy"].clone()
    assert torch.equal(env.reset(seed=1)["policy"], first)
    fillers = 0
    for _ in range(40):
        step = env.step(torch.ones(3, dtype=torch.int64))
        assert torch.equal(step.reward, step.valid.float())
        fillers += int((~step.valid).sum())
    assert fillers >= 3
    with pytest.raises(ValueError, match="contradicts"):
        make_gymnasium("CartPole-v1", 3, vectorization="vector_entry_point", autoreset="same_step")


def test_auto_is_sync_in_same_step_mode():
    env = make_gymnasium("CartPole-v1", 2)
    assert env.spec.final_obs == "separate" and env.spec.truncates is True and env.spec.env_id == "CartPole-v1"
    env.reset(seed=0)
    for _ in range(30):
        step = env.step(torch.ones(2, dtype=torch.int64))
        if step.final_obs is not None:
            ended = step.terminated
            assert (step.final_obs["policy"][ended, 2].abs() > 0.2).all() and (step.obs["policy"][ended] < 0.1).all()
            break
    else:
        pytest.fail("no episode ended")


@pytest.mark.parametrize("mode", MODES)
def test_half_cheetah_is_truncated_at_its_limit(mode):
    env = make_gymnasium("HalfCheetah-v5", 2, autoreset=mode, max_episode_steps=4, info_keys=("x_velocity",))
    assert env.spec.obs == {"policy": TensorSpec((17,))}
    assert env.spec.action == Continuous((-1.0,) * 6, (1.0,) * 6) and env.spec.truncates is True
    env.reset(seed=0)
    steps = [env.step(torch.full((2, 6), 0.1)) for _ in range(4)]
    assert steps[3].truncated.all() and not steps[3].terminated.any()
    assert steps[3].info["x_velocity"].abs().min() > 0
    env.close()


def test_asynchronous_environment_by_id():
    env = make_gymnasium("Pendulum-v1", 2, vectorization="async", max_episode_steps=3)
    assert env.spec.truncates is True
    env.reset(seed=0)
    ends = [bool(env.step(torch.zeros(2, 1)).truncated.all()) for _ in range(6)]
    assert ends == [False, False, True] * 2
    env.close()


def test_time_limit_of_unknown_environments_is_unknown():
    assert GymnasiumEnv(counters("same_step")).spec.truncates is None
    limited = SyncVectorEnv([lambda: gymnasium.wrappers.TimeLimit(Counter(), 5)])
    assert GymnasiumEnv(limited).spec.truncates is True


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("HalfCheeta-v5", "HalfCheetah-v5"), ("cartpole-v1", "CartPole-v1"), ("CartPole-v7", "CartPole-v1")],
)
def test_unknown_id_names_the_nearest(wrong, right):
    with pytest.raises(ValueError, match=f"{wrong}.*did you mean.*{right}"):
        make_gymnasium(wrong, 1)


def test_unknown_module_is_named():
    with pytest.raises(ValueError, match="no_such_module"):
        make_gymnasium("no_such_module:Env-v0", 1)


@pytest.mark.parametrize(
    "kind",
    [{}, pytest.param({"vectorization": "async", "vector_kwargs": {"context": "spawn"}}, marks=pytest.mark.long)],
)
def test_mujoco_says_nothing_about_the_models_of_gymnasium(kind, tmp_path, monkeypatch, capfd):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    make_gymnasium("HalfCheetah-v5", 2, **kind).close()
    out, err = capfd.readouterr()
    assert "WARNING" not in out + err
    assert not list(tmp_path.iterdir())


def test_missing_mujoco_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(ImportError, match=r'pip install "canter\[mujoco\]"'):
        make_gymnasium("HalfCheetah-v5", 1)
