"""Batched torch environments: Gymnasium's dynamics, exact restarts and resumes, physics and queueing theory."""

import math
import warnings
from contextlib import contextmanager

import gymnasium
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from canter.algorithms.ppo import PPOConfig
from canter.core.specs import Continuous, Discrete, Env, MultiDiscrete, Stateful, TrainingProgress
from canter.core.struct import tree_map
from canter.envs.tensor import CartPole, Null, Pendulum, Quadrotor, QueueNetwork, tensor_envs
from canter.envs.tensor.quadrotor import GRAVITY, HEIGHT, HOVER_THRUST, MAX_RATES, from_rotation_vector, rotation_matrix
from canter.training.collector import Collector

NAMES = ("cartpole", "maze", "null", "pendulum", "quadrotor", "queue", "swimmer")
ASKS_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "item")


def random_action(env, generator):
    match env.spec.action:
        case Continuous(low, high):
            low, high = torch.tensor(low), torch.tensor(high)
            return low + (high - low) * torch.rand(env.num_envs, len(low), generator=generator)
        case Discrete(n):
            return torch.randint(n, (env.num_envs,), generator=generator)
        case MultiDiscrete(nvec):
            return torch.stack([torch.randint(n, (env.num_envs,), generator=generator) for n in nvec], -1)


START = TrainingProgress(iteration=0, env_steps=0, fraction=0.0)


def rollout(env, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [env.step(random_action(env, generator)).map(torch.clone) for _ in range(steps)]


def assert_same(left, right):
    tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True), left, right)


class NoHostSync(TorchDispatchMode):
    """Fails on every operator that would make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in ASKS_HOST, f"{func} asks the host"
        if name in ("index", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "indexing by a mask asks the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def syncs_forbidden():
    """CUDA's own check, which also sees copies from the host."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
class TestContract:
    def test_fits_the_protocols_and_its_own_spec(self, name):
        env = tensor_envs[name](3)
        obs = env.reset(seed=0)
        step = rollout(env, 1)[0]
        assert isinstance(env, Env) and isinstance(env, Stateful)
        assert env.spec.env_id == f"tensor:{name}" and env.spec.final_obs == "separate" and env.spec.truncates
        for group in (obs, step.obs, step.final_obs):
            assert {k: (v.shape, v.dtype) for k, v in group.items()} == {
                k: ((3, *spec.shape), spec.dtype) for k, spec in env.spec.obs.items()
            }
        assert step.reward.shape == (3,) and step.reward.dtype == torch.float32
        assert step.terminated.dtype == step.truncated.dtype == torch.bool and step.valid.all()
        env.close()

    def test_a_seed_reproduces_the_rollout_and_another_seed_does_not(self, name):
        first, second = tensor_envs[name](5, "cpu"), tensor_envs[name](5, torch.device("cpu"))
        runs = []
        for env, seed in ((first, 7), (second, 7), (first, 7), (second, 8)):
            env.reset(seed)
            runs.append(rollout(env, 20))
        assert_same(tuple(runs[0]), tuple(runs[1]))
        assert_same(tuple(runs[0]), tuple(runs[2]))
        with pytest.raises(AssertionError):
            assert_same(tuple(runs[0]), tuple(runs[3]))

    def test_resumes_bit_for_bit_from_a_saved_state(self, name):
        env = tensor_envs[name](6, max_episode_steps=11, random_start=True)
        env.reset(seed=1)
        env.set_progress(START)
        rollout(env, 15)
        saved, obs = env.state_dict(), env.observe()
        expected = rollout(env, 25, seed=2)
        other = tensor_envs[name](6, max_episode_steps=11, random_start=True)
        other.load_state_dict(saved)
        assert_same(other.observe(), obs)
        assert_same(tuple(rollout(other, 25, seed=2)), tuple(expected))
        assert any(step.truncated.any() for step in expected)

    def test_state_keeps_its_addresses(self, name):
        env = tensor_envs[name](4, max_episode_steps=3)
        env.reset(seed=0)
        places = {k: v.data_ptr() for k, v in env._state.items()} | {"steps": env._step_count.data_ptr()}
        rollout(env, 10)
        env.load_state_dict(env.state_dict())
        env.reset()
        assert places == {k: v.data_ptr() for k, v in env._state.items()} | {"steps": env._step_count.data_ptr()}

    def test_stepping_never_asks_the_host(self, name):
        env = tensor_envs[name](4, max_episode_steps=3)
        env.reset(seed=0)
        generator = torch.Generator().manual_seed(0)
        actions = [random_action(env, generator) for _ in range(8)]
        with NoHostSync():
            env.reset()
            for action in actions:
                env.step(action)

    def test_observations_are_not_views_of_the_state(self, name):
        env = tensor_envs[name](4)
        obs = env.reset(seed=0)
        before = env.state_dict()["state"]
        for group in obs.values():
            group.zero_()
        assert_same(env.state_dict()["state"], before)

    def test_time_limit_truncates_every_third_step_with_the_true_last_observation(self, name):
        env, free = tensor_envs[name](2, max_episode_steps=3), tensor_envs[name](2, max_episode_steps=None)
        env.reset(seed=3)
        free.load_state_dict(env.state_dict())
        assert not free.spec.truncates
        steps, unlimited = rollout(env, 6), rollout(free, 3)
        assert [step.truncated.tolist() for step in steps] == [[False] * 2, [False] * 2, [True] * 2] * 2
        assert_same(steps[2].final_obs, unlimited[2].obs)
        assert_same(steps[1].final_obs, steps[1].obs)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    def test_a_captured_step_on_cuda_equals_the_eager_one(self, name):
        env = tensor_envs[name](64, "cuda", max_episode_steps=5)
        env.reset(seed=0)
        action = random_action(env, torch.Generator().manual_seed(0)).cuda()
        with syncs_forbidden():
            env.step(action)
        saved = env.state_dict()
        eager = [env.step(action).map(torch.clone) for _ in range(12)]
        env.load_state_dict(saved)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(env.generator)
        with torch.cuda.graph(graph):
            captured = env.step(action)
        torch.cuda.synchronize()  # where the random stream begins is written beside the recording
        env.load_state_dict(saved)
        for expected in eager:
            graph.replay()
            torch.testing.assert_close(captured.obs, expected.obs)
            assert torch.equal(captured.truncated, expected.truncated)


def test_a_loaded_quadrotor_never_asks_the_host():
    env = Quadrotor(4, loaded=True, max_episode_steps=3)
    env.reset(seed=0)
    with NoHostSync():
        for _ in range(5):
            env.step(torch.zeros(4, 4))


def test_termination_wins_when_the_time_limit_strikes_at_once():
    env = CartPole(1, max_episode_steps=1)
    env.reset(seed=0)
    saved = env.state_dict()
    saved["state"]["body"] = torch.tensor([[2.39, 10.0, 0.0, 0.0]])
    env.load_state_dict(saved)
    step = env.step(torch.tensor([1]))
    assert step.terminated.item() and not step.truncated.item()
    assert step.final_obs is not None
    assert step.final_obs["policy"][0, 0].item() == pytest.approx(2.59)  # 2.39 + 0.02 * 10
    assert step.obs["policy"].abs().max() <= 0.05


def test_random_start_spreads_the_first_time_limits():
    env = Pendulum(64, max_episode_steps=50, random_start=True)
    env.reset(seed=0)
    saved = env.state_dict()
    env.set_progress(START)
    ends = torch.stack([step.truncated for step in rollout(env, 50)])
    assert ends.sum(0).tolist() == [1] * 64
    assert ends.any(1).sum() > 25
    env.load_state_dict(saved)  # of a training that has not begun
    env.set_progress(START)
    assert torch.equal(torch.stack([step.truncated for step in rollout(env, 50)]), ends)


def test_an_evaluation_has_whole_episodes_whatever_random_start():
    env = Pendulum(64, max_episode_steps=50, random_start=True)
    env.reset(seed=0)
    ends = torch.stack([step.truncated for step in rollout(env, 50)])
    assert ends.any(1).nonzero().tolist() == [[49]]


def test_wrong_action_shape_wrong_state_and_missing_reset_are_named():
    env = CartPole(2)
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"shape \(2, 1\), tensor:cartpole needs \(2,\)"):
        env.step(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"num_envs=3.*body, step_count"):
        CartPole(3).load_state_dict(env.state_dict())
    with pytest.raises(ValueError, match="random_start=True needs max_episode_steps"):
        CartPole(3, max_episode_steps=None, random_start=True)
    with pytest.raises(KeyError, match="did you mean cartpole"):
        tensor_envs["cartpol"]


def put_state(reference, *values):
    reference.reset()
    reference.unwrapped.state = torch.stack(values).numpy()


def balance(obs):
    """Pushes that keep the pole up and the cart near the middle."""
    return (obs @ torch.tensor([0.05, 0.15, 1.0, 0.5]) > 0).long()


@pytest.mark.parametrize("policy", ["random", "balance"])
def test_cartpole_equals_gymnasium_step_for_step(policy):
    env, reference = CartPole(1, dtype=torch.float64), gymnasium.make("CartPole-v1")
    obs = env.reset(seed=4)["policy"]
    put_state(reference, *env._state["body"][0])
    generator = torch.Generator().manual_seed(0)
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(1100):
        action = random_action(env, generator) if policy == "random" else balance(obs)
        step = env.step(action)
        last_obs, reward, terminated, truncated, _ = reference.step(action.item())
        assert step.final_obs is not None
        torch.testing.assert_close(step.final_obs["policy"][0], torch.from_numpy(last_obs), rtol=1e-6, atol=1e-7)
        assert (step.reward.item(), step.terminated.item(), step.truncated.item()) == (reward, terminated, truncated)
        obs = step.obs["policy"]
        if terminated or truncated:
            ends["terminated" if terminated else "truncated"] += 1
            reference.reset()
        # Every step from the same state: libraries differ in the last bits of a sine, which an unstable pole magnifies.
        reference.unwrapped.state = env._state["body"][0].numpy().copy()
    assert ends["terminated"] > 30 if policy == "random" else ends == {"terminated": 0, "truncated": 2}


def test_cartpole_positions_only_hides_the_velocities():
    seen, hidden = CartPole(4), CartPole(4, positions_only=True)
    torch.testing.assert_close(hidden.reset(seed=0)["policy"], seen.reset(seed=0)["policy"][:, [0, 2]])
    assert hidden.spec.obs["policy"].shape == (2,)


def test_pendulum_equals_gymnasium_step_for_step():
    env, reference = Pendulum(1, dtype=torch.float64), gymnasium.make("Pendulum-v1")
    env.reset(seed=0)
    put_state(reference, env._state["angle"][0], env._state["spin"][0])
    generator = torch.Generator().manual_seed(0)
    cuts = 0
    for _ in range(450):
        action = 1.5 * random_action(env, generator)  # beyond the bounds, too
        step = env.step(action)
        last_obs, reward, terminated, truncated, _ = reference.step(action[0].numpy())
        assert step.final_obs is not None
        torch.testing.assert_close(step.final_obs["policy"][0], torch.from_numpy(last_obs), rtol=1e-6, atol=1e-6)
        assert step.reward.item() == pytest.approx(reward, rel=1e-6)
        assert (step.terminated.item(), step.truncated.item()) == (terminated, truncated)
        if truncated:
            cuts += 1
            put_state(reference, env._state["angle"][0], env._state["spin"][0])
    assert cuts == 2


def test_null_changes_everything_and_ends_episodes_both_ways():
    env = Null(256, obs_dim=5, action_dim=2, max_episode_steps=200)
    first = env.reset(seed=0)["policy"]
    steps = rollout(env, 300)
    terminated = torch.stack([step.terminated for step in steps]).float().mean().item()
    assert 1 / 1000 < terminated < 1 / 100
    assert any(step.truncated.any() for step in steps)
    assert (steps[0].obs["policy"] != first).all() and steps[0].reward.std() > 0.1


def still_quadrotor(num_envs=1, **options):
    """At rest and level in the middle of the path, under a target that does not move."""
    env = Quadrotor(num_envs, **options)
    env.reset(seed=0)
    saved = env.state_dict()
    for name in ("velocity", "rates", "amplitude"):
        saved["state"][name].zero_()
    saved["state"]["position"].copy_(torch.tensor([0.0, 0.0, HEIGHT]))
    saved["state"]["attitude"].copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    env.load_state_dict(saved)
    return env, saved


class TestQuadrotor:
    def test_hover_thrust_keeps_the_altitude_and_earns_the_full_reward(self):
        env, _ = still_quadrotor()
        for _ in range(200):
            step = env.step(torch.zeros(1, 4))
        assert env._state["position"][0].tolist() == pytest.approx([0.0, 0.0, HEIGHT], abs=1e-3)
        assert step.reward.item() == pytest.approx(1.0, abs=1e-4)

    def test_free_fall_keeps_the_energy(self):
        env, saved = still_quadrotor(drag=0.0)
        saved["state"]["rotors"].zero_()
        saved["state"]["velocity"].copy_(torch.tensor([1.0, 0.0, 2.0]))
        env.load_state_dict(saved)
        for _ in range(25):  # half a second
            env.step(torch.tensor([[-1.0, 0.0, 0.0, 0.0]]))
        position, velocity = env._state["position"][0], env._state["velocity"][0]
        assert velocity.tolist() == pytest.approx([1.0, 0.0, 2.0 - GRAVITY * 0.5], abs=1e-4)
        energy = GRAVITY * position[2] + 0.5 * velocity.square().sum()
        assert energy.item() == pytest.approx(GRAVITY * HEIGHT + 0.5 * 5.0, rel=1e-5)

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_body_rates_follow_the_command(self, axis):
        env, _ = still_quadrotor(max_episode_steps=None)
        action = torch.zeros(1, 4)
        action[0, 1 + axis] = 0.2
        for _ in range(12):
            env.step(action)
        expected = [0.0] * 3
        expected[axis] = 0.2 * MAX_RATES[axis]
        assert env._state["rates"][0].tolist() == pytest.approx(expected, abs=0.1 * 0.2 * MAX_RATES[axis])

    def test_rotors_lag_and_saturate(self):
        env, _ = still_quadrotor()
        env.step(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))  # 20 ms of a 30 ms lag towards twice the hover thrust
        expected = HOVER_THRUST * (2 - math.exp(-2 / 3))
        assert env._state["rotors"][0].tolist() == pytest.approx([expected] * 4, rel=1e-4)

    def test_attitude_stays_a_rotation_under_random_actions(self):
        env = Quadrotor(64)
        env.reset(seed=0)
        for step in rollout(env, 200):
            assert (step.reward > 0).all() and (step.reward <= 1).all()
        rotation = rotation_matrix(env._state["attitude"])
        identity = torch.eye(3).expand(64, 3, 3)
        torch.testing.assert_close(rotation @ rotation.transpose(1, 2), identity, rtol=0, atol=1e-5)

    def test_quarter_turn_about_z_takes_x_to_y(self):
        turn = rotation_matrix(from_rotation_vector(torch.tensor([0.0, 0.0, math.pi / 2])))
        torch.testing.assert_close(turn @ torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]))

    @pytest.mark.parametrize(
        "position, ends", [((0.0, 0.0, -0.1), True), ((3.1, 0.0, 2.0), True), ((1.0, 0.0, 2.0), False)]
    )
    def test_ground_and_distance_terminate(self, position, ends):
        env, saved = still_quadrotor()
        saved["state"]["position"].copy_(torch.tensor(position))
        env.load_state_dict(saved)
        assert env.step(torch.zeros(1, 4)).terminated.item() is ends

    def test_a_plain_feedback_controller_tracks_the_target_to_the_time_limit(self):
        env = Quadrotor(64, max_episode_steps=250)
        obs = env.reset(seed=0)["policy"]
        distance = []
        for _ in range(249):
            step = env.step(feedback(obs))
            assert not (step.terminated | step.truncated).any()
            obs = step.obs["policy"]
            distance.append(obs[:, :3].norm(dim=-1))
        assert env.step(feedback(obs)).truncated.all()
        assert torch.stack(distance)[150:].mean() < 0.15


def feedback(obs):
    """Accelerate towards where the target will be, by leaning the thrust there; all vectors in the body frame."""
    error, velocity, rotation, ahead = obs[:, :3], obs[:, 3:6], obs[:, 6:15].view(-1, 3, 3), obs[:, 22:25]
    up = rotation[:, 2]  # world z seen from the body
    wanted = 6.0 * error + 4.0 * (ahead / 0.25 - velocity) + GRAVITY * up
    lean = torch.linalg.cross(
        torch.tensor([0.0, 0.0, 1.0]).expand_as(wanted), wanted / wanted.norm(dim=-1, keepdim=True)
    )
    thrust = wanted[:, 2:] / GRAVITY - 1.0
    return torch.cat((thrust, 8.0 * lean / torch.tensor(MAX_RATES)), -1).clamp(-1.0, 1.0)


def average_cost(env, choose, steps=600, warm_up=300):
    """Long-run average cost per unit of time and its standard error over the rows, which are independent."""
    obs = env.reset(seed=0)
    paid, time = torch.zeros(env.num_envs, dtype=torch.float64), torch.zeros(env.num_envs, dtype=torch.float64)
    for t in range(warm_up + steps):
        step = env.step(choose(obs))
        obs = step.obs
        if t >= warm_up:
            paid -= step.reward
            time += step.info["duration"]
    cost = paid / time.mean()
    return cost.mean().item(), cost.std().item() / math.sqrt(env.num_envs)


def lowest_allowed(obs):
    """Priority to the first class that waits."""
    return obs["action_mask"].long().argmax(-1)


class TestQueue:
    @pytest.mark.parametrize("sampled_duration", [False, True])
    def test_mm1_holds_load_over_one_minus_load_customers(self, sampled_duration):
        env = QueueNetwork(
            1024,
            arrival_rates=(0.5,),
            service_rates=(1.0,),
            holding_costs=(3.0,),
            servers=(0,),
            routing=(-1,),
            sampled_duration=sampled_duration,
            max_episode_steps=None,
        )
        cost, error = average_cost(env, lambda obs: torch.zeros(1024, dtype=torch.int64))
        assert env.event_rate == 1.5
        # 3 * 0.5 / (1 - 0.5). Four standard errors: a right simulator fails once in 16 000 seeds; the seed is fixed.
        assert abs(cost - 3.0) < 4 * error < 0.3

    def test_crisscross_with_priority_to_class_0_costs_three(self):
        env = QueueNetwork(1024, max_episode_steps=None)
        cost, error = average_cost(env, lowest_allowed)
        # Server 0 conserves work: classes 0 and 1 together are M/M/1 at load 0.6, 1.5 customers. Class 0 alone is
        # M/M/1 at 0.3, so it leaves as a Poisson stream (Burke) and class 2 is M/M/1 at 0.6: another 1.5.
        assert env.event_rate == pytest.approx(4.2)
        assert abs(cost - 3.0) < 4 * error < 0.3

    def test_priority_of_the_better_c_mu_product_is_cheaper_by_the_known_amount(self):
        options = dict(
            arrival_rates=(0.3, 0.3),
            service_rates=(1.0, 1.0),
            holding_costs=(4.0, 1.0),
            servers=(0, 0),
            routing=(-1, -1),
            max_episode_steps=None,
        )
        # Work conservation: 0.6 / 0.4 = 1.5 customers in all, of which the favoured class has 0.3 / 0.7.
        few = 0.3 / 0.7
        cost, error = average_cost(QueueNetwork(1024, **options), lowest_allowed)
        assert abs(cost - (4 * few + (1.5 - few))) < 4 * error < 0.4
        cost, error = average_cost(
            QueueNetwork(1024, **options), lambda obs: 1 - obs["action_mask"].flip(-1).long().argmax(-1)
        )
        assert abs(cost - (4 * (1.5 - few) + few)) < 4 * error < 0.8

    def test_events_move_single_customers_along_the_routes(self):
        env = QueueNetwork(512, max_episode_steps=None)
        obs = env.reset(seed=0)
        moves = set()
        for _ in range(200):
            step = env.step(lowest_allowed(obs))
            moves |= {tuple(row) for row in (step.obs["policy"] - obs["policy"]).int().tolist()}
            obs = step.obs
            assert (obs["policy"] >= 0).all()
        assert moves == {(0, 0, 0), (1, 0, 0), (0, 1, 0), (-1, 0, 1), (0, -1, 0), (0, 0, -1)}

    def test_the_network_reports_how_full_and_how_idle_it_is(self):
        env = QueueNetwork(3)
        env.reset(seed=0)
        env._state["queue"].copy_(torch.tensor([[0.0, 0.0, 2.0], [1.0, 3.0, 0.0], [0.0, 0.0, 0.0]]))
        metrics = env.step(torch.zeros(3, dtype=torch.int64)).metrics
        assert metrics["customers"].item() == 2.0
        assert metrics["idle"].item() == pytest.approx(2 / 3)

    def test_reports_reach_the_log_without_a_host_read(self):
        env = QueueNetwork(4)
        collector = Collector(env, PPOConfig(horizon=4, num_minibatches=1).build(env.spec, 0), 0)
        collector.tracker.reads_at_once = False  # as on a GPU
        collector.collect()
        with NoHostSync():
            collector.collect()
            assert collector.env_metrics().keys() == {"env/customers", "env/idle"}

    def test_mask_allows_waiting_classes_and_all_when_none_waits(self):
        env = QueueNetwork(4)
        env.reset(seed=0)
        saved = env.state_dict()
        saved["state"]["queue"].copy_(torch.tensor([[0.0, 0, 5], [2, 0, 0], [0, 1, 0], [3, 3, 0]]))
        env.load_state_dict(saved)
        assert env.observe()["action_mask"].tolist() == [[True, True], [True, False], [False, True], [True, True]]
        # Pays for the queue the action saw, for 1 / 4.2 units of time.
        step = env.step(torch.tensor([0, 0, 1, 0]))
        assert step.reward.tolist() == pytest.approx([-5 / 4.2, -2 / 4.2, -1 / 4.2, -6 / 4.2])
        assert step.info["duration"].tolist() == pytest.approx([1 / 4.2] * 4)

    def test_serving_an_empty_class_idles(self):
        env = QueueNetwork(256, arrival_rates=(0.0, 0.0, 0.0), max_episode_steps=None)
        env.reset(seed=0)
        saved = env.state_dict()
        saved["state"]["queue"].copy_(torch.tensor([0.0, 4.0, 0.0]))
        env.load_state_dict(saved)
        for _ in range(20):
            env.step(torch.zeros(256, dtype=torch.int64))
        assert (env._state["queue"] == torch.tensor([0.0, 4.0, 0.0])).all()

    @pytest.mark.parametrize(
        "options, rule",
        [
            ({"servers": (0, 1, 1)}, "every other server exactly one"),
            ({"routing": (3, -1, -1)}, "class numbers 0..2"),
            ({"holding_costs": (1.0,)}, "one entry per class"),
            ({"service_rates": (1.0, 0.0, 1.0)}, "must be positive"),
        ],
    )
    def test_impossible_networks_are_refused(self, options, rule):
        with pytest.raises(ValueError, match=rule):
            QueueNetwork(1, **options)
