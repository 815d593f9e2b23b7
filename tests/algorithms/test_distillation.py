"""Distillation: losses by formulas written out here, what flows back how far, resuming, and a student that learns."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import canter
from canter.algorithms.distillation import DistillationBatch
from canter.app.cli import main
from canter.core.plain import from_plain, to_plain
from canter.envs.tensor import CartPole, Outcome, Pendulum, TensorEnv
from canter.nn.heads import GaussianHead
from canter.training.collector import Collector

MEMORY = canter.NetworkConfig(hidden=(8,), rnn=canter.RNNConfig(hidden=8))


def teacher_for(env, path, memory=False, **model):
    """A policy file of a teacher that has learned nothing, with statistics that are not those of the beginning."""
    policy = MEMORY if memory else canter.NetworkConfig(hidden=(8,))
    algorithm = canter.PPOConfig(
        horizon=16, num_minibatches=2, epochs=1, model=canter.ModelConfig(policy=policy, policy_gain=1.0, **model)
    ).build(env.spec, 3)
    collector = Collector(env, algorithm, 0)
    algorithm.update(collector.collect())
    canter.save_policy(path, algorithm.policy)
    return str(path)


@pytest.fixture
def pendulum(tmp_path):
    return teacher_for(Pendulum(4), tmp_path / "teacher.safetensors")


def build(teacher, env=None, seed=0, **settings):
    env = env or Pendulum(4, max_episode_steps=6)
    given: dict[str, Any] = {"horizon": 8, "sequence_length": 4, "num_minibatches": 2, "epochs": 1}
    config = canter.DistillationConfig(**given | {"teacher": teacher} | settings)
    algorithm = config.build(env.spec, seed)
    return algorithm, Collector(env, algorithm, seed)


def double(x):
    return x.detach().double().numpy()


@pytest.mark.parametrize("loss", ["mse", "huber", "kl"])
def test_the_loss_of_continuous_actions_is_that_of_the_formula(pendulum, loss):
    """In float64: squares, Huber's with a border at 1, and KL(teacher || student) of two Gaussians."""
    algorithm, collector = build(pendulum, loss=loss, policy_gain=1.0)
    rollout = collector.collect()
    rollout.valid[3] = False
    rows = {"obs": {k: v[:-1] for k, v in rollout.obs.items()}, "teacher": 3 * rollout.record.teacher}
    batch = DistillationBatch(**rows, valid=rollout.valid, reset=rollout.reset[:-1], state=())
    found = algorithm.imitation_loss(batch)
    params, _ = algorithm.actor(rows["obs"], (), None)
    mine, wanted = double(params)[rollout.valid.numpy()], double(batch.teacher)[rollout.valid.numpy()]
    (mean, log_std), (goal, goal_log_std) = (np.split(x, 2, -1) for x in (mine, wanted))
    gap = mean - goal
    expected = {
        "mse": gap**2,
        "huber": np.where(np.abs(gap) < 1, 0.5 * gap**2, np.abs(gap) - 0.5),
        "kl": log_std - goal_log_std + (np.exp(2 * goal_log_std) + gap**2) / (2 * np.exp(2 * log_std)) - 0.5,
    }[loss].mean()
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    assert found.metrics["policy/action_error"].item() == pytest.approx(np.sqrt((gap**2).mean()), rel=1e-5)


def test_the_loss_of_choices_is_that_of_the_formula(tmp_path):
    teacher = teacher_for(CartPole(4), tmp_path / "teacher.safetensors")
    algorithm, collector = build(teacher, CartPole(4), policy_gain=1.0)
    rollout = collector.collect()
    obs = {k: v[:-1] for k, v in rollout.obs.items()}
    batch = DistillationBatch(obs, rollout.record.teacher, rollout.valid, rollout.reset[:-1], ())
    params, _ = algorithm.actor(obs, (), None)

    def probabilities(logits):
        raised = np.exp(double(logits))
        return raised / raised.sum(-1, keepdims=True)

    p, q = probabilities(rollout.record.teacher), probabilities(params)
    found = algorithm.imitation_loss(batch)
    assert found.loss.item() == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)
    assert found.metrics["policy/agreement"].item() == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())


def test_gradients_flow_through_the_whole_sequence_and_no_step_is_left_over(pendulum):
    """With a sequence as long as the rollout they are those of the rollout at once; without, of each part."""
    gradients = {}
    for length in (8, 4):
        algorithm, collector = build(pendulum, policy=MEMORY, sequence_length=length, num_minibatches=1)
        rollout = collector.collect()
        metrics = algorithm.update(rollout)
        assert metrics["optim/minibatch_updates"] == 1
        fresh, _ = build(pendulum, policy=MEMORY, sequence_length=length)
        obs = {k: v[:-1] for k, v in rollout.obs.items()}
        state, losses = tuple(tuple(x[0] for x in layer) for layer in rollout.state), []
        for t in range(8):
            if t % length == 0:
                state = tuple(tuple(x.detach() for x in layer) for layer in state)
            row = {k: v[t : t + 1] for k, v in obs.items()}
            params, state = fresh.actor(row, state, rollout.reset[t : t + 1])
            mine, wanted = (fresh.distribution.mode(x) for x in (params[0], rollout.record.teacher[t]))
            losses.append((mine - wanted) ** 2)
        expected = torch.autograd.grad(torch.stack(losses).mean(), list(fresh.actor.parameters()), allow_unused=True)
        given = algorithm.phase.optimizer.gradients
        for parameter, wanted in zip(algorithm.actor.parameters(), expected, strict=True):
            wanted = torch.zeros_like(parameter) if wanted is None else wanted
            torch.testing.assert_close(given[parameter], wanted, rtol=1e-4, atol=1e-6)
        gradients[length] = torch.cat([g.flatten() for g in given.values()])
    assert not torch.allclose(gradients[8], gradients[4], rtol=1e-3)
    with pytest.raises(ValueError, match=r"sequence_length=3 does not divide horizon=8; use sequence_length=2, or"):
        build(pendulum, policy=MEMORY, sequence_length=3)


def test_the_student_acts_and_the_teacher_at_times(pendulum):
    """Actions of the teacher are its means; with a share of 1 all are, and a linear schedule fades."""
    actions = {}
    for share in (0.0, 0.5, 1.0):
        env = Pendulum(512)
        algorithm, collector = build(pendulum, env, mixture=canter.Constant(share), num_minibatches=1)
        obs = env.reset(0)
        given, record, _ = algorithm.act(obs, (), torch.ones(512, dtype=torch.bool))
        teachers = algorithm.distribution.to_env(algorithm.distribution.mode(record.teacher))
        actions[share] = (given == teachers).all(-1).float().mean().item()
    # Three standard deviations of a share of a half among 512.
    assert actions[0.0] == 0.0 and actions[1.0] == 1.0 and abs(actions[0.5] - 0.5) < 3 * 0.5 / 512**0.5
    algorithm, collector = build(pendulum, mixture=canter.Linear(1.0))
    shares = []
    for number in range(4):
        algorithm.set_progress(number / 4)
        shares.append(algorithm.update(collector.collect())["policy/mixture"].item())
    assert shares == [1.0, 0.75, 0.5, 0.25]


def test_a_recurrent_teacher_continues_from_its_state_after_each_step(tmp_path):
    teacher = teacher_for(Pendulum(4), tmp_path / "teacher.safetensors", memory=True)
    algorithm, _ = build(teacher)
    observations = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
    alone = canter.load_policy(teacher)
    state = alone.initial_state(4)
    for number, obs in enumerate(observations):
        reset = torch.tensor([number == 0, number == 0, False, number == 2])
        _, record, _ = algorithm.act({"policy": obs}, (), reset)
        expected, state = alone.params({"policy": obs}, state, reset)
        torch.testing.assert_close(record.teacher, expected)


@pytest.mark.parametrize("remembers", ["student", "teacher", "both"])
def test_resuming_continues_bit_for_bit_and_does_not_trust_the_file_again(tmp_path, remembers):
    path = tmp_path / "teacher.safetensors"
    teacher = teacher_for(Pendulum(4), path, memory=remembers != "student")
    settings: dict[str, Any] = {"policy": MEMORY} if remembers != "teacher" else {}
    settings |= {"mixture": canter.Linear(1.0), "loss": "kl"}
    first, collector = build(teacher, **settings)
    saved = first.state_dict(), collector.state_dict()
    for number in range(4):
        first.set_progress(number / 5)
        first.update(collector.collect())
        if number == 1:
            saved = first.state_dict(), collector.state_dict()
    other = canter.load_policy(teacher)
    for parameter in other.actor.parameters():
        parameter.data.mul_(2)
    canter.save_policy(path, other)  # what the file holds by now is another teacher
    second, _ = build(teacher, seed=1, **settings)
    replayed = Collector(collector.env, second, 0)
    second.load_state_dict(saved[0])
    replayed.load_state_dict(saved[1])
    for number in (2, 3):
        second.set_progress(number / 5)
        second.update(replayed.collect())
    mine, theirs = first.state_dict(), second.state_dict()
    for part in ("student", "teacher"):
        assert all(torch.equal(mine[part][key], theirs[part][key]) for key in mine[part])


def test_the_teacher_never_changes(pendulum):
    algorithm, collector = build(pendulum)
    before = {key: value.clone() for key, value in algorithm.teacher.actor.state_dict().items()}
    for _ in range(3):
        algorithm.update(collector.collect())
    assert all(torch.equal(before[key], value) for key, value in algorithm.teacher.actor.state_dict().items())


class Brakes(TensorEnv):
    """A cart to be held at 0 by its acceleration; "policy" shows its position, "all" also its velocity."""

    def __init__(self, num_envs=64):
        obs = {"policy": canter.TensorSpec((1,)), "all": canter.TensorSpec((2,))}
        action = canter.Continuous((-1.0,), (1.0,))
        super().__init__("test:brakes", num_envs, "cpu", obs, action, max_episode_steps=50)

    def _sample_state(self):
        return {"cart": torch.cat((self._uniform(-1, 1, 1), torch.zeros(self.num_envs, 1)), -1)}

    def _advance(self, state, action):
        place, velocity = state["cart"].unbind(-1)
        velocity = velocity + 0.2 * action[:, 0].clamp(-1, 1)
        cart = torch.stack((place + 0.2 * velocity, velocity), -1)
        return Outcome({"cart": cart}, -cart[:, 0].square(), torch.zeros_like(place, dtype=torch.bool))

    def _observe(self, state):
        return {"policy": state["cart"][:, :1].clone(), "all": state["cart"].clone()}


def brakes_teacher(path):
    """Position and velocity, each with a gain of 1, written into a policy of one linear layer."""
    network = canter.NetworkConfig(hidden=(), obs_groups=("all",), normalize_obs=False)
    policy = canter.ModelConfig(policy=network).build_policy(Brakes().spec)
    head = policy.actor.head
    assert isinstance(head, GaussianHead)
    head.mean.weight.data = torch.tensor([[-1.0, -1.0]])
    head.mean.bias.data.zero_()
    canter.save_policy(path, policy)
    return str(path)


def settled(policy):
    """Mean return over episodes of 50 steps from new starts."""
    return canter.evaluate(policy, Brakes(), 64, 7).mean


def test_a_recurrent_student_learns_hidden_state_and_ppo_continues_from_it(tmp_path):
    """Held against the teacher and against a student without memory, which cannot know the velocity."""
    teacher = brakes_teacher(tmp_path / "teacher.safetensors")
    returns = {}
    policies = {}
    for name, memory in (("lstm", canter.RNNConfig(hidden=16)), ("none", None)):
        network = canter.NetworkConfig(hidden=(32,), rnn=memory, normalize_obs=False)
        optimizer = canter.OptimizerConfig(learning_rate=canter.Linear(5e-3))
        settings = {"policy": network, "horizon": 16, "sequence_length": 16, "epochs": 2, "optimizer": optimizer}
        algorithm, collector = build(teacher, Brakes(), **settings)
        for number in range(60):
            algorithm.set_progress(number / 60)
            algorithm.update(collector.collect())
        returns[name] = settled(algorithm.policy)
        policies[name] = algorithm.policy
    best = settled(canter.load_policy(teacher))
    assert returns["lstm"] > 1.3 * best > 0.65 * returns["none"]  # returns are negative

    student = policies["lstm"]
    canter.save_policy(tmp_path / "student.safetensors", student)
    model = replace(student.config, policy_gain=0.01)
    ppo = canter.PPOConfig(horizon=16, epochs=1, num_minibatches=2, sequence_length=4, model=model)
    config = canter.TrainConfig(algorithm=ppo, total_steps=2048)
    begin = canter.InitFrom(tmp_path / "student.safetensors")
    with canter.Trainer(config, env=Brakes()) as trainer:
        assert begin.load(trainer.algorithm) is None  # a policy is of no iteration
        assert settled(trainer.algorithm.policy) == pytest.approx(returns["lstm"], rel=1e-5)
        trainer.learn()
    other = replace(ppo, model=canter.ModelConfig())
    with (
        canter.Trainer(replace(config, algorithm=other), env=Brakes()) as trainer,
        pytest.raises(ValueError, match=r"policy .*student\.safetensors does not fit: .* missing"),
    ):
        begin.load(trainer.algorithm)


def test_a_mismatch_is_refused_by_name(tmp_path, pendulum):
    for settings, message in (
        ({"teacher": ""}, "teacher is empty"),
        ({"teacher": str(tmp_path / "nothing")}, "there is no policy"),
        ({"env": CartPole(4)}, r"returns Continuous.*, the environment takes Discrete"),
        ({"teacher_obs": {"polcy": "policy"}}, r"names 'polcy', unknown to the teacher: did you mean policy"),
        ({"teacher_obs": {"policy": "polcy"}}, r"'polcy' here is not there, did you mean policy"),
        ({"num_minibatches": 5}, r"num_minibatches=5 does not divide .* = 8 \* 4 = 32; use .*horizon=10$"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**{"teacher": pendulum} | settings)
    cartpole = teacher_for(CartPole(4), tmp_path / "cartpole.safetensors")
    with pytest.raises(ValueError, match=r"'policy' has shape \(4,\), and 'policy' here is \(2,\); teacher_obs="):
        build(cartpole, CartPole(4, positions_only=True))
    with pytest.raises(ValueError, match="loss=mse is for continuous actions"):
        build(cartpole, CartPole(4), loss="mse")
    for wrong, message in (
        ({"mixture": 2.0}, r"mixture=2\.0 must begin in 0\.\.1"),
        ({"mixture": {"kind": "adaptive_kl", "start": 0.01}}, "mixture: adaptive_kl follows updates of PPO"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"techer": "x"}, "techer: unknown key, did you mean teacher"),
    ):
        with pytest.raises(ValueError, match=message):
            from_plain({"algorithm": {"kind": "distillation", **wrong}}, canter.TrainConfig())
    config = from_plain({"algorithm": {"kind": "distillation", "teacher": "x", "mixture": 0.5}}, canter.TrainConfig())
    assert from_plain(to_plain(config), canter.TrainConfig()) == config
    lines = canter.DistillationConfig(sequence_length=3, std=canter.StdConfig(initial=0.2)).unused(CartPole(4).spec)
    assert [line.split(" has")[0] for line in lines] == ["algorithm.std.initial=0.2", "algorithm.sequence_length=3"]


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teacher = teacher_for(CartPole(4), tmp_path / "teacher.safetensors")
    flags = ["--total-steps", "2048", "--console", "quiet", "--name", "student", "--run-dir", str(tmp_path)]
    main(["distill", teacher, "tensor:cartpole", *flags])
    student = canter.load_policy(tmp_path / "student")
    assert student.actor.network.groups == ("policy",) and student.spec.obs["policy"].shape == (2,)
    assert "Distillation on tensor:cartpole" in capsys.readouterr().out
    for given, message in (
        (["distill", "model_100.pt", "ENV"], "canter import model_100.pt --config SETTINGS"),
        (["distill", "nothing", "tensor:cartpole"], "no policy file and no run 'nothing'"),
    ):
        with pytest.raises(SystemExit):
            main(given)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["distill", "--help"])
    assert "canter distill [TEACHER] [ENV]" in capsys.readouterr().out
