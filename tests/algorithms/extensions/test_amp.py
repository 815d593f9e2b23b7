"""Style from clips: loss and reward by formulas written out here, what counts as a transition, and that it resumes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import canter
from canter.algorithms.extensions.amp import CLIP
from canter.core.plain import from_plain, to_plain
from canter.envs.tensor import Outcome, Swimmer, TensorEnv
from canter.training.collector import Collector

WIDE, NARROW = (f"canter:swimmer_{name}.npz" for name in ("wide", "narrow"))
SMALL = {"motions": (WIDE,), "hidden": (8,), "batch_size": 16, "updates": 2, "replay": 64, "replay_rows": 8}


def build(amp=None, seed=0, num_envs=4, env=None, **settings):
    """PPO with style from clips, and what collects for it; episodes of 5 steps."""
    made = env or Swimmer(num_envs, motion=True, max_episode_steps=5)
    config = canter.PPOConfig(
        horizon=8, epochs=1, num_minibatches=2, extensions=(canter.AMPConfig(**SMALL | (amp or {})),), **settings
    )
    algorithm = config.build(made.spec, seed)
    return algorithm, Collector(made, algorithm, seed)


def double(tensor):
    return tensor.detach().double().numpy()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_the_reward_is_that_of_the_formula():
    """`-log(max(1 - sigmoid(d), 1e-4))` in float64, with d by numpy and statistics of both kinds of rows."""
    algorithm, collector = build({"task_weight": 0.25, "style_weight": 0.75, "reward_scale": 3.0})
    (amp,) = algorithm.extensions
    w1, b1, w2, b2 = (double(p) for p in (*amp.trunk.parameters(), *amp.logit.parameters()))
    rollout = collector.collect()
    w2, amp.logit.weight.data = 40 * w2, 40 * amp.logit.weight.data  # so that some logits pass the limit
    state = amp.generator.get_state()
    given = double(amp.reward(rollout))
    amp.generator.set_state(state)
    shown = double(amp.demonstrations(32))
    rows = rollout.transitions(["motion"])
    x = np.concatenate([double(rows.obs["motion"]), double(rows.next_obs["motion"])], -1)
    both = np.concatenate([x.reshape(-1, 18), shown])
    normal = np.clip((x - both.mean(0)) / np.sqrt(both.var(0) + 1e-8), -CLIP, CLIP)
    logit = (np.maximum(normal @ w1.T + b1, 0) @ w2.T + b2)[..., 0]
    style = 3.0 * -np.log(np.maximum(1 - sigmoid(logit), 1e-4))
    assert style.max() == pytest.approx(3 * -np.log(1e-4)) and style.min() < 1
    np.testing.assert_allclose(given, 0.25 * double(rollout.reward) + 0.75 * style, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("replay", [64, 0])
def test_loss_penalties_and_their_gradient_are_those_of_the_formulas(replay):
    """Cross-entropy, the squared slope of a ReLU network written out layer by layer, and squared weights."""
    numbers = {"gradient_penalty": 2.0, "logit_regularization": 0.3, "weight_regularization": 0.01}
    algorithm, collector = build({"replay": replay, "hidden": (8, 6), **numbers})
    (amp,) = algorithm.extensions
    for _ in range(2):
        algorithm.update(collector.collect())
    rollout = collector.collect()
    algorithm.with_rewards(rollout)
    batch = amp.draw(rollout)
    output = amp.discriminator_loss(batch)
    own = [*amp.trunk.parameters(), *amp.logit.parameters()]
    mine = torch.autograd.grad(output.loss, own)

    w1, b1, w2, b2, w3, b3 = parameters = [p.detach().double().requires_grad_() for p in own]

    def logits(x):
        first = x.double()[0] @ w1.T + b1
        second = first.clamp(min=0) @ w2.T + b2
        slope = (w3 * (second > 0)) @ w2 * (first > 0) @ w1  # the chain rule, row by row
        return (second.clamp(min=0) @ w3.T + b3)[:, 0], slope

    def entropy(logit, label):
        p = torch.sigmoid(logit)
        return -(label * torch.log(p) + (1 - label) * torch.log(1 - p))

    demo, slope = logits(batch.demo)
    agent = torch.cat([logits(batch.agent)[0], logits(batch.before)[0]] if replay else [logits(batch.agent)[0]])
    expected = (
        0.5 * (entropy(agent, 0.0).mean() + entropy(demo, 1.0).mean())
        + 2.0 * (slope**2).sum(-1).mean()
        + 0.3 * (w3**2).sum()
        + 0.01 * sum((w**2).sum() for w in (w1, w2, w3))
    )
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for found, wanted in zip(mine, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)
    logged = {name: value.item() for name, value in output.metrics.items()}
    assert logged["amp/gradient_penalty"] == pytest.approx((slope**2).sum(-1).mean().item(), rel=1e-4)
    assert logged["amp/accuracy_demo"] == (demo > 0).double().mean().item()
    assert logged["amp/accuracy_agent"] == pytest.approx((agent[:32] < 0).double().mean().item())
    assert logged["amp/logit_agent"] == pytest.approx(agent[:32].mean().item(), rel=1e-4)


class Counts(TensorEnv):
    """Counts up from 100 times the number of the episode; the last observation of an episode ends in 3."""

    def __init__(self):
        obs = {"policy": canter.TensorSpec((1,)), "amp": canter.TensorSpec((1,))}
        super().__init__("test:counts", 1, "cpu", obs, canter.Discrete(2), truncates=False)
        self.episodes = 0

    def _sample_state(self):
        self.episodes += 1
        return {"count": torch.full((1,), 100.0 * self.episodes)}

    def _advance(self, state, action):
        count = state["count"] + 1
        return Outcome({"count": count}, count * 0, count % 100 >= 3)

    def _observe(self, state):
        return {name: state["count"].unsqueeze(-1).clone() for name in ("policy", "amp")}


ONE = {"columns": ("dof_positions/joint_1",), "time_step": 0.02}


@pytest.mark.parametrize("frames", [2, 3, 4])
def test_transitions_never_cross_a_reset_and_have_the_true_last_observation(frames):
    """Over three rollouts of 4 steps each, whose borders lie anywhere in episodes of 3."""
    config = canter.PPOConfig(
        horizon=4, num_minibatches=1, extensions=(canter.AMPConfig(**SMALL | ONE, frames=frames),)
    )
    env = Counts()
    algorithm = config.build(env.spec, 0)
    (amp,), collector = algorithm.extensions, Collector(env, algorithm, 0)
    found = []
    for _ in range(6):
        rollout = collector.collect()
        rows, valid, _ = amp.transitions(rollout)
        found += rows[valid].tolist()
        amp.draw(rollout)
    remainders = [[x % 100 for x in row] for row in found]
    assert all(row == list(range(int(row[0]), int(row[0]) + frames)) for row in remainders)
    assert all(len({x // 100 for x in row}) == 1 for row in found)
    # Each of 8 whole episodes has 5 - frames windows, all of them with the last observation.
    assert len(found) == 8 * (5 - frames) and sum(row[-1] == 3 for row in remainders) == 8


def test_transitions_without_a_known_successor_earn_no_style_and_are_not_stored():
    algorithm, collector = build({"task_weight": 0.0, "replay_rows": 64, "normalize_obs": False})
    (amp,), rollout = algorithm.extensions, collector.collect()
    rollout.valid[2] = False
    rollout.obs["motion"][2] = 1e6
    rollout.valid[1] = False  # it leads to the row with nonsense
    given = amp.reward(rollout)
    assert (given[1:3] == 0).all() and (given[3] > 0).all()
    batch = amp.draw(rollout)
    assert batch.agent.abs().max() < 1e3 and amp.ring.abs().max() < 1e3 and batch.valid.all()
    rollout.valid.zero_()
    written, ring = amp.written.clone(), amp.ring.clone()
    assert not amp.draw(rollout).valid.any()
    assert torch.equal(amp.written, written) and torch.equal(amp.ring, ring)


def test_the_ring_holds_the_newest_and_draws_from_all_that_it_holds():
    algorithm, collector = build({"replay": 20, "replay_rows": 8, "batch_size": 500})
    (amp,) = algorithm.extensions
    for number in range(1, 5):
        rollout = collector.collect()
        batch = amp.draw(rollout)
        held = {tuple(row) for row in amp.normalizer(amp.ring[: min(8 * number, 20)]).tolist()}
        assert {tuple(row) for row in batch.before[0].tolist()} == held
    assert amp.written == 32


def test_the_discriminator_learns_from_standardised_frames_with_noise_and_rates_them_without():
    algorithm, collector = build({"batch_size": 4000, "input_noise": 0.3, "replay": 0})
    (amp,), rollout = algorithm.extensions, collector.collect()
    state = amp.generator.get_state()
    given = amp.reward(rollout)
    before = amp.generator.get_state()
    blurred = amp.draw(rollout)
    amp.config = replace(amp.config, input_noise=0.0)
    amp.generator.set_state(before)
    plain = amp.draw(rollout)
    rows = {tuple(row) for row in amp.normalizer(amp.transitions(rollout)[0]).flatten(0, 1).tolist()}
    assert {tuple(row) for row in plain.agent[0].tolist()} <= rows
    amp.generator.set_state(state)
    torch.testing.assert_close(amp.reward(rollout), given)
    noise = (blurred.agent - plain.agent)[0].double()
    # 144,000 numbers: the standard error of their deviation is 0.0006.
    assert noise.std(correction=0).item() == pytest.approx(0.3, abs=0.003) and abs(noise.mean().item()) < 0.004
    correlated = torch.corrcoef(noise.T) - torch.eye(18)
    assert correlated.abs().max() < 0.06


def test_demonstrations_are_consecutive_observations_of_the_clip():
    algorithm, _ = build({"motions": (WIDE, NARROW), "motion_weights": (0.0, 1.0), "frames": 3})
    (amp,) = algorithm.extensions
    first, second, third = amp.demonstrations(256).double().chunk(3, -1)
    time = 2 * np.pi * 1.715 * 0.02
    for joint in range(3):  # a sine of the known frequency: x(t - dt) + x(t + dt) = 2 cos(w dt) x(t)
        error = first[:, joint] + third[:, joint] - 2 * np.cos(time) * second[:, joint]
        assert error.abs().max() < 0.005  # linear between frames of 1/60 s: 0.4 (w/60)^2 / 8 at a time
    assert second[:, :3].abs().max() <= 0.4 + 1e-6


def test_episodes_may_start_with_a_frame_of_the_reference():
    env = Swimmer(512, motion=True, reference=NARROW)
    joints = env.reset(0)["motion"][:, :6].double()
    # On the ellipse of each joint: (angle / 0.4)^2 + (rate / (0.4 w))^2 = 1.
    ellipse = (joints[:, :3] / 0.4) ** 2 + (joints[:, 3:] / (0.4 * 2 * np.pi * 1.715)) ** 2
    torch.testing.assert_close(ellipse, torch.ones_like(ellipse), atol=0.02, rtol=0.0)
    assert joints[:, 0].min() < -0.39 and joints[:, 0].max() > 0.39


class Mover(TensorEnv):
    """A point whose velocity is the action, and all that is seen."""

    def __init__(self):
        super().__init__(
            "test:mover", 64, "cpu", {name: canter.TensorSpec((1,)) for name in ("policy", "amp")},
            canter.Continuous((-1.0,), (1.0,)), max_episode_steps=16,
        )  # fmt: skip

    def _sample_state(self):
        return {"velocity": self._uniform(-1, 1, 1)}

    def _advance(self, state, action):
        return Outcome({"velocity": action.clamp(-1, 1)}, action[:, 0] * 0, torch.zeros(64, dtype=torch.bool))

    def _observe(self, state):
        return {name: state["velocity"].clone() for name in ("policy", "amp")}


@pytest.mark.parametrize("speed", [0.5, -0.5])
def test_swapping_the_data_swaps_what_is_learned(tmp_path, speed):
    """From a table, in an environment that says nothing of clips: the mean velocity comes to that of the clip."""
    lines = [f"{t},{speed * t},{speed + 0.2 * np.sin(3 * t)}" for t in np.arange(0, 8.01, 0.1)]
    path = tmp_path / "clip.csv"
    path.write_text("\n".join(["time,dof_positions/x,dof_velocities/x", *lines]))
    amp = {"motions": (str(path),), "columns": ("dof_velocities/x",), "time_step": 0.1, "hidden": (32,), "updates": 4}
    amp |= {"batch_size": 128, "gradient_penalty": 0.5, "task_weight": 0.0, "replay": 2000, "replay_rows": 200}
    optimizer = canter.OptimizerConfig(learning_rate=canter.Constant(3e-3))
    ppo = {"optimizer": optimizer, "gamma": 0.5, "model": canter.ModelConfig(std=canter.StdConfig(initial=0.3))}
    algorithm, collector = build(amp | {"optimizer": optimizer}, env=Mover(), **ppo)
    for _ in range(60):
        metrics = algorithm.update(collector.collect())
    mean = collector.rollout.record.action.clamp(-1, 1).mean().item()
    assert mean == pytest.approx(speed, abs=0.25)
    assert metrics["amp/pose_error"] < 0.25


def test_resuming_continues_bit_for_bit():
    (first, collector), (second, _) = build({"frames": 3}), build({"frames": 3}, seed=1)
    for number in range(4):
        first.update(collector.collect())
        if number == 1:
            saved = first.state_dict(), collector.state_dict()
    replayed = Collector(collector.env, second, 0)
    second.load_state_dict(saved[0])
    replayed.load_state_dict(saved[1])
    for _ in range(2):
        second.update(replayed.collect())
    mine, theirs = ((a.state_dict()["model"], a.state_dict()["extensions"]) for a in (first, second))
    for part, other in zip(mine, theirs, strict=True):
        assert part.keys() == other.keys() and all(torch.equal(part[key], other[key]) for key in part)


def test_fast_engines_stay_in_use():
    algorithm, _ = build()
    plain = canter.PPOConfig(horizon=8, num_minibatches=2).build(algorithm.spec, 0)
    assert algorithm.engine.name == plain.engine.name


VARIED = {
    "motions": (NARROW,),
    "motion_weights": (0.2, 0.8),
    "obs_group": "policy",
    "columns": tuple(f"dof_velocities/joint_{k}" for k in (1, 2, 3) * 3),
    "time_step": 0.1,
    "frames": 3,
    "task_weight": 0.9,
    "style_weight": 0.9,
    "reward_scale": 1.0,
    "hidden": (5,),
    "activation": "tanh",
    "normalize_obs": False,
    "input_noise": 0.5,
    "gradient_penalty": 1.0,
    "logit_regularization": 5.0,
    "weight_regularization": 5.0,
    "batch_size": 8,
    "updates": 3,
    "replay": 0,
    "replay_rows": 4,
    "optimizer": canter.OptimizerConfig(learning_rate=canter.Constant(0.1)),
}


@pytest.mark.long
def test_every_setting_has_an_effect():
    """On what the policy learns, three updates on."""
    assert set(VARIED) == set(canter.AMPConfig.__dataclass_fields__)

    def learned(**settings):
        model = canter.ModelConfig(normalize_value=False)
        algorithm, collector = build({"optimizer": fast} | settings, model=model)
        for _ in range(3):
            algorithm.update(collector.collect())
        return torch.cat([p.detach().flatten() for p in algorithm.model.parameters()])

    fast = canter.OptimizerConfig(learning_rate=canter.Constant(0.01))
    base = learned()
    assert torch.equal(base, learned())
    both = {"motions": (WIDE, NARROW)}
    bases = {"motion_weights": learned(**both)}
    for name, value in VARIED.items():
        if name == "obs_group":
            continue
        given = {name: value} | (both if name == "motion_weights" else {})
        assert not torch.equal(bases.get(name, base), learned(**given)), name
    eleven = {"columns": tuple(f"dof_velocities/joint_{k}" for k in (1, 2, 3) * 3 + (1, 2))}
    assert not torch.equal(base, learned(obs_group="policy", **eleven))


def test_settings_work_in_files_and_are_refused_by_name():
    plain = {"algorithm": {"extensions": [{"kind": "amp", "motions": [WIDE], "frames": 3}]}}
    config = from_plain(plain, canter.TrainConfig())
    assert config.algorithm.extensions[0] == canter.AMPConfig(motions=(WIDE,), frames=3)
    assert from_plain(to_plain(config), canter.TrainConfig()) == config
    for wrong, message in (
        ({"frames": 1}, r"extensions\[0\]\.frames=1 must be at least 2"),
        ({"reward_scale": 0.0}, r"reward_scale=0\.0 must be above 0"),
        ({"replay": 10, "replay_rows": 11}, "replay_rows=11 is more than replay=10"),
        ({"motion_weights": [1.0]}, r"motion_weights=\(1\.0,\) must be one for each of 0 motions"),
        ({"motion": [WIDE]}, r"motion: unknown key, did you mean motions"),
        ({"optimizer": {"learning_rate": {"kind": "adaptive_kl", "start": 1e-3}}}, "adaptive_kl follows the policy"),
    ):
        with pytest.raises(ValueError, match=message):
            from_plain({"algorithm": {"extensions": [{"kind": "amp", **wrong}]}}, canter.TrainConfig())
    for amp, env, message in (
        ({"motions": ()}, None, "motions names no clips"),
        ({}, Swimmer(4), r"obs_group names 'motion', which the environment does not return"),
        ({"obs_group": "policy"}, None, "'policy' is none that the environment compares with clips"),
        ({"frames": 600}, None, r"lasts 10 s, 600 frames take 11\.98 s"),
        ({"columns": ("dof_positions/joint_1",), "obs_group": "motion"}, None, "has 9 components, clips have 1"),
        ({}, Counts(), r"does not declare how to observe clips \(EnvSpec\.motion\): set columns and time_step"),
    ):
        with pytest.raises(ValueError, match=message):
            build(amp, env=env)
