import math

import pytest
import torch

from canter.algorithms.ppo import PPOConfig
from canter.core.specs import Discrete, EnvSpec, Step, TensorSpec
from canter.envs.tensor import CartPole, Pendulum
from canter.nn.actor_critic import ModelConfig
from canter.nn.network import NetworkConfig
from canter.nn.rnn import RNNConfig
from canter.training.collector import Collector
from canter.training.episodes import NonFiniteObservation


class Script:
    """An environment whose observations count its steps, in one buffer that every step overwrites."""

    def __init__(self, num_envs=2, spoil=None):
        self.spec = EnvSpec({"policy": TensorSpec((1,))}, Discrete(2), num_envs, truncates=True)
        self.buffer, self.spoil, self.count = torch.zeros(num_envs, 1), spoil, 0

    def reset(self, seed=None):
        self.count = 0
        self.buffer.fill_(0.0)
        return {"policy": self.buffer}

    def step(self, action):
        self.count += 1
        self.buffer.fill_(float(self.count))
        flags = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        step = Step({"policy": self.buffer}, torch.ones(self.spec.num_envs), flags, flags.clone(), ~flags)
        if self.spoil:
            self.spoil(self.count, step)
        return step

    def close(self):
        pass


def collector_of(env, horizon=4):
    algorithm = PPOConfig(horizon=horizon, epochs=1, num_minibatches=1).build(env.spec, seed=0)
    return Collector(env, algorithm, seed=0), algorithm


def test_observations_are_copied_before_the_environment_overwrites_them():
    collector, _ = collector_of(Script())
    assert collector.collect().obs["policy"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert collector.collect().obs["policy"][:, 0, 0].tolist() == [4, 5, 6, 7, 8]


def test_a_rollout_starts_with_the_recurrent_state_after_the_one_before():
    env = Script()
    model = ModelConfig(policy=NetworkConfig(hidden=(8,), rnn=RNNConfig(hidden=6)))
    config = PPOConfig(horizon=4, epochs=1, num_minibatches=1, sequence_length=4, model=model)
    algorithm = config.build(env.spec, seed=0)
    collector = Collector(env, algorithm, seed=0)
    returned = []

    def act(obs, state, reset):
        result = algorithm.act(obs, state, reset)
        returned.append(result[2][0][0].clone())
        return result

    collector.collect(act)
    rollout = collector.collect(act)
    assert returned[3].abs().min() > 0
    assert torch.equal(rollout.state[0][0][0], returned[3])


def test_rollouts_reuse_their_memory():
    collector, _ = collector_of(Script())
    first = collector.collect().reward.data_ptr()
    assert collector.collect().reward.data_ptr() == first


def test_episodes_run_on_from_one_rollout_to_the_next():
    env = CartPole(4)
    collector, _ = collector_of(env, horizon=7)
    lengths, returns, steps = [], [], 0
    for _ in range(30):
        collector.collect()
        episodes = collector.read_episodes()
        lengths += episodes.length
        returns += episodes.return_
        steps += episodes.env_steps
    assert max(lengths) > 7
    assert returns == lengths  # CartPole pays 1 a step
    assert steps == 30 * 7 * 4
    assert sum(lengths) + int(collector.tracker.running_length.sum()) == steps


def test_episodes_that_restart_have_new_seeds_and_count_from_zero():
    env = Script()
    seeds = []
    reset = env.reset
    env.reset = lambda seed=None: (seeds.append(seed), reset(seed))[1]
    collector, _ = collector_of(env)
    for _ in range(2):
        collector.collect()
        collector.read_episodes()
        assert collector.tracker.running_return.tolist() == [4.0, 4.0]
        collector.load_state_dict(collector.state_dict())  # this environment cannot save its state
        assert collector.tracker.running_return.tolist() == [0.0, 0.0]
        assert collector.tracker.running_length.tolist() == [0, 0]
    assert len(set(seeds)) == 3


def test_steps_that_are_no_transitions_add_neither_reward_nor_time():
    def spoil(count, step):
        step.info["duration"] = torch.tensor([2.0, 3.0])
        step.valid[0] = count != 2

    collector, _ = collector_of(Script(spoil=spoil))
    collector.collect()
    assert collector.tracker.running_return.tolist() == [3.0, 4.0]
    assert collector.tracker.running_length.tolist() == [3, 4]
    episodes = collector.read_episodes()
    assert episodes.gain_and_time == [[[3.0, 4.0], [6.0, 12.0]]]
    assert (episodes.env_steps, episodes.mean_reward) == (7, 1.0)


def test_episodes_are_terminated_or_truncated_and_their_totals_start_again():
    def spoil(count, step):
        step.terminated[0] = count == 2
        step.truncated[1] = count in (3, 4)

    collector, _ = collector_of(Script(spoil=spoil))
    collector.collect()
    episodes = collector.read_episodes()
    assert episodes.length == [2, 3, 1]
    assert episodes.return_ == [2.0, 3.0, 1.0]
    assert episodes.terminated == [True, False, False]
    assert collector.tracker.running_return.tolist() == [2.0, 0.0]


def test_two_collectors_with_one_seed_see_the_same():
    rollouts = []
    for _ in range(2):
        collector, _ = collector_of(Pendulum(3))
        rollouts.append(collector.collect())
    assert torch.equal(rollouts[0].obs["policy"], rollouts[1].obs["policy"])
    assert torch.equal(rollouts[0].record.action, rollouts[1].record.action)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_stops_the_run_naming_env_key_and_step(value):
    def spoil(count, step):
        if count == 7:
            step.reward[1] = value

    collector, algorithm = collector_of(Script(spoil=spoil))
    algorithm.update(collector.collect())
    collector.read_episodes()
    with pytest.raises(NonFiniteObservation, match=rf"environment 1 returned reward = {value} at its step 6"):
        collector.collect()


def test_an_observation_that_is_not_finite_stops_the_run_naming_its_group_and_component():
    def spoil(count, step):
        if count == 2:
            step.obs["policy"][0] = math.nan

    collector, _ = collector_of(Script(spoil=spoil))
    message = r"environment 0 returned observation 'policy' component \[0\] = nan"
    with pytest.raises(NonFiniteObservation, match=message):
        collector.collect()


def report(**by_step):
    """An environment that reports metrics in the steps that are named, counted from 1."""

    def spoil(count, step):
        step.metrics = {name: torch.tensor(float(values[count])) for name, values in by_step.items() if count in values}

    return Script(spoil=spoil)


def read(collector):
    return {name: value.item() for name, value in collector.env_metrics().items()}


def test_simulator_metrics_are_averaged_over_the_steps_that_reported_them():
    lift, fall = {1: 2, 2: 4, 3: 0, 4: 10, 5: 1}, {2: 1, 4: math.nan, 7: 5}
    collector, _ = collector_of(report(lift=lift, fall=fall))
    assert collector.env_metrics() == {}
    collector.collect()
    assert read(collector) == {"env/lift": 4.0, "env/fall": 1.0}
    place = collector.reported.table.data_ptr()
    collector.collect()
    assert read(collector) == {"env/lift": 1.0, "env/fall": 5.0}
    assert collector.reported.table.data_ptr() == place
    collector.collect()
    assert all(math.isnan(value) for value in read(collector).values())  # nothing came, and nothing old is shown


def test_an_environment_that_reports_nothing_costs_nothing():
    collector, _ = collector_of(Script())
    collector.collect()
    assert collector.env_metrics() == {} and collector.reported.table.numel() == 0
