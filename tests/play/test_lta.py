import pytest
import torch

from canter.envs.gymnasium import make_gymnasium
from canter.envs.tensor import QueueNetwork, tensor_envs
from canter.play.evaluation import long_run_average


class Constant:
    """Always the first action, or no force."""

    def __init__(self, spec):
        self.action = (
            torch.zeros(spec.num_envs, 1) if hasattr(spec.action, "low") else torch.zeros(spec.num_envs).long()
        )

    def initial_state(self, num_envs):
        return ()

    def act(self, obs, state, reset, *, deterministic, generator):
        return self.action, state


def one_queue(num_envs, **options):
    return QueueNetwork(
        num_envs,
        arrival_rates=(0.5,),
        service_rates=(1.0,),
        holding_costs=(1.0,),
        servers=(0,),
        routing=(-1,),
        max_episode_steps=None,
        **options,
    )


@pytest.mark.parametrize("sampled", [False, True], ids=["mean durations", "sampled durations"])
def test_a_queue_with_one_server_costs_what_theory_says(sampled):
    """M/M/1 with load 1/2 holds rho / (1 - rho) = 1 customer on average."""
    env = one_queue(64, sampled_duration=sampled)
    average = long_run_average(Constant(env.spec), env, 2000, warm_up=300, seed=0)
    assert average.mean == pytest.approx(-1.0, abs=1.5 * average.ci)
    assert 0.005 < average.ci < 0.08


def test_without_a_warm_up_empty_queues_at_the_start_count():
    env = one_queue(256)
    early = long_run_average(Constant(env.spec), env, 20, warm_up=0, seed=0)
    assert early.mean > -0.8


def test_a_step_is_the_default_unit_of_time():
    env = tensor_envs["probe-cycle"](4)
    average = long_run_average(Constant(env.spec), env, 40, warm_up=1, seed=0)
    assert (average.mean, average.ci) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-6))


def test_steps_that_only_reset_do_not_count():
    env = make_gymnasium("CartPole-v1", 2, autoreset="next_step")
    average = long_run_average(Constant(env.spec), env, 200, warm_up=0, seed=0)
    env.close()
    assert average.mean == 1.0


def test_a_seed_reproduces_the_average():
    first, again = (
        long_run_average(Constant(one_queue(8).spec), one_queue(8), 50, warm_up=3, seed=7) for _ in range(2)
    )
    assert first == again


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"steps": 19, "warm_up": 0}, "steps=19 must be at least 20"), ({"steps": 20, "warm_up": -1}, "warm_up=-1")],
)
def test_lengths_that_make_no_sense_are_refused(settings, message):
    env = one_queue(2)
    with pytest.raises(ValueError, match=message):
        long_run_average(Constant(env.spec), env, seed=0, **settings)
