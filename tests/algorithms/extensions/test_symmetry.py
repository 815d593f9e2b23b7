"""Symmetry: gradients and losses by formulas written out here, old densities, memory, and that it resumes."""

from dataclasses import replace

import pytest
import torch

import canter
from canter.algorithms.extensions.symmetry import Symmetries
from canter.core.plain import from_plain, to_plain
from canter.core.struct import tree_map
from canter.training.collector import Collector


def build(env="tensor:swimmer", memory=False, num_envs=4, seed=0, config=None, **symmetry):
    """PPO with symmetry or `without`, of a policy that is not symmetric at first, and what collects for it."""
    extensions = () if symmetry.pop("without", False) else (canter.SymmetryConfig(**symmetry),)
    made = canter.EnvConfig(id=env, num_envs=num_envs).build("cpu")
    rnn = canter.RNNConfig(hidden=6) if memory else None
    policy = canter.NetworkConfig(hidden=(8,), rnn=rnn)
    settings = {"horizon": 8, "epochs": 2, "num_minibatches": 2, "sequence_length": 4} | (config or {})
    model = canter.ModelConfig(policy=policy, policy_gain=1.0, std=canter.StdConfig(initial=0.5))
    algorithm = canter.PPOConfig(model=model, extensions=extensions, **settings).build(made.spec, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in algorithm.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return algorithm, Collector(made, algorithm, seed)


def in_float64(algorithm):
    algorithm.model.double()
    algorithm.optimizers = algorithm._build_optimizers()
    algorithm.use_engine("autograd")


def gradient(algorithm, batch):
    """Return the gradient of the loss of a whole batch, as one vector."""
    algorithm.engine.gradients(batch, torch.arange(batch.valid.shape[1]), algorithm.coefs)
    return torch.cat([view.flatten().clone() for view in algorithm.optimizers["policy"].gradients.values()])


@pytest.mark.parametrize("env", ["tensor:swimmer", "tensor:quadrotor", "tensor:cartpole"])
@pytest.mark.parametrize("old", ["evaluated", "repeated"])
def test_the_gradient_is_the_mean_of_those_on_data_and_on_its_mirror_images(env, old):
    """In float64, by an algorithm without symmetry that is given the images, which are mirrored here by hand."""
    (algorithm, collector), (plain, _) = build(env, old_log_prob=old), build(env, without=True)
    rollout = collector.collect().map(lambda x: x.double() if x.is_floating_point() else x)
    for each in (algorithm, plain):
        in_float64(each)
    batch, _ = algorithm.prepare_batch(rollout)
    plain.model.load_state_dict(algorithm.model.state_dict())  # value statistics too
    symmetries = collector.env.spec.symmetries
    groups = {"tensor:quadrotor": [(0,), (1,), (0, 1)]}.get(env, [(0,)])
    images = [batch]
    for chosen in groups:
        image = batch
        for number in chosen:
            image = mirrored_by_hand(image, symmetries[number])
        params = algorithm.model.actor(image.obs, (), None)[0].detach()
        log_prob = algorithm.distribution.log_prob(params, image.action)
        images.append(replace(image, log_prob=log_prob if old == "evaluated" else batch.log_prob))
    expected = torch.stack([gradient(plain, replace(image, carried={})) for image in images]).mean(0)
    torch.testing.assert_close(gradient(algorithm, batch), expected, rtol=1e-9, atol=1e-12)
    assert expected.norm() > 1e-3


def mirrored_by_hand(batch, symmetry):
    """Each component for itself."""
    obs = {}
    for name, group in batch.obs.items():
        mirror = symmetry.obs[name]
        columns = [group[..., mirror.order[i]] * mirror.sign[i] for i in range(group.shape[-1])]
        obs[name] = torch.stack(columns, -1)
    action = batch.action
    if action.is_floating_point():
        columns = [action[..., symmetry.action.order[i]] * symmetry.action.sign[i] for i in range(action.shape[-1])]
        action = torch.stack(columns, -1)
    else:
        action = 1 - action
    return replace(batch, obs=obs, action=action)


def test_the_first_ratio_of_a_mirrored_row_is_one_only_with_evaluated_densities():
    found = {}
    for old in ("evaluated", "repeated"):
        algorithm, collector = build(old_log_prob=old)
        batch, _ = algorithm.prepare_batch(collector.collect())
        both = algorithm.extensions.each[0].augment(batch)
        params = algorithm.model.actor(both.obs, (), None)[0]
        ratio = (algorithm.distribution.log_prob(params, both.action) - both.log_prob).exp()
        found[old] = (ratio - 1).abs().max().item()
    assert found["evaluated"] < 1e-5
    assert found["repeated"] > 0.05  # the policy that acted was not symmetric


def test_kl_and_entropy_are_of_the_original_samples():
    algorithm, collector = build(old_log_prob="repeated", config={"entropy_coef": canter.Constant(0.1)})
    plain, _ = build(without=True, config={"entropy_coef": canter.Constant(0.1)})
    batch, _ = algorithm.prepare_batch(collector.collect())
    with torch.no_grad():
        for model in (algorithm.model, plain.model):
            model.actor.head.mean.bias += 0.3  # both policies have moved alike
    plain.use_engine("autograd")
    output, plain_output = (a.engine.evaluate(batch, a.coefs) for a in (algorithm, plain))
    torch.testing.assert_close(output.kl, plain_output.kl)
    assert output.kl > 0.1
    mine, theirs = output.metrics, plain_output.metrics
    for name in ("policy/entropy", "policy/clip_fraction"):
        torch.testing.assert_close(mine[name], theirs[name])
    assert (mine["loss/policy"] - theirs["loss/policy"]).abs() > 1e-4
    # A mirrored row whose recorded distribution is nonsense would show in a KL that counted it.
    counted = algorithm.extensions.each[0].augment(batch)
    assert counted.original.sum() * 2 == counted.original.numel()


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("env", ["tensor:swimmer", "tensor:quadrotor", "tensor:cartpole"])
def test_the_mirror_loss_is_that_of_its_formula(env, augment):
    algorithm, collector = build(env, mirror_loss=0.7, augment=augment)
    batch, _ = algorithm.prepare_batch(collector.collect())
    valid = batch.valid.clone()
    valid[:, ::3] = False
    batch = replace(batch, valid=valid)
    metrics = algorithm.engine.evaluate(batch, algorithm.coefs).metrics
    symmetries = collector.env.spec.symmetries
    chosen = [(0,), (1,), (0, 1)] if len(symmetries) == 2 else [(0,)]

    def act(obs):
        params = algorithm.model.actor(obs, (), None)[0]
        return params[..., : params.shape[-1] // 2] if env != "tensor:cartpole" else params.softmax(-1)

    errors = []
    for numbers in chosen:
        obs, wanted = batch.obs["policy"], act(batch.obs)
        for number in numbers:
            obs, wanted = symmetries[number].obs["policy"](obs), symmetries[number].action(wanted)
        errors.append((act({"policy": obs}) - wanted).square().mean(-1)[valid].mean())
    torch.testing.assert_close(metrics["policy/asymmetry"], torch.stack(errors).mean())
    torch.testing.assert_close(metrics["loss/mirror"], 0.7 * metrics["policy/asymmetry"])
    assert metrics["loss/mirror"] > 1e-6


def test_a_mirror_loss_alone_makes_a_policy_symmetric():
    optimizer = canter.OptimizerConfig(learning_rate=canter.Constant(0.01))
    algorithm, collector = build(augment=False, mirror_loss=100.0, config={"horizon": 16, "optimizer": optimizer})
    first = None
    for _ in range(15):
        metrics = algorithm.update(collector.collect())
        first = metrics["policy/asymmetry"] if first is None else first
    assert metrics["policy/asymmetry"] < first / 10


def test_an_extension_without_effect_is_refused():
    with pytest.raises(ValueError, match="leave nothing to do"):
        canter.SymmetryConfig(augment=False)


def test_a_mirrored_sequence_has_the_recurrent_state_of_the_mirrored_past():
    """By hand: the policy that sees the mirror image of everything from the first step on."""
    algorithm, collector = build(memory=True)
    (symmetry,) = collector.env.spec.symmetries
    network = algorithm.model.actor.network
    state = network.initial_state(4)
    for _ in range(3):  # memory runs on from one rollout to the next
        rollout = collector.collect()
        batch, _ = algorithm.prepare_batch(rollout)
        both = algorithm.extensions.each[0].augment(batch)
        states, params = [], []
        for t in range(8):
            if t % 4 == 0:
                states.append(state)
            seen = {"policy": symmetry.obs["policy"](rollout.obs["policy"][t : t + 1])}
            found, state = algorithm.model.actor(seen, state, rollout.reset[t : t + 1])
            params.append(found[0])
        expected = algorithm.distribution.log_prob(torch.stack(params), symmetry.action(rollout.record.action))
        count = batch.valid.shape[1]
        torch.testing.assert_close(both.log_prob[:, count:], torch.cat(expected.split(4), 1), rtol=1e-4, atol=1e-5)
        mine = tree_map(lambda x: x[0].chunk(2)[1], both.policy_state)
        tree_map(lambda a, *b: torch.testing.assert_close(a, torch.cat(b)), mine, *states)


def test_resuming_continues_bit_for_bit_with_a_recurrent_policy():
    (first, collector), (second, _) = build(memory=True, mirror_loss=0.5), build(memory=True, mirror_loss=0.5, seed=1)
    for number in range(4):
        first.update(collector.collect())
        if number == 1:
            second.load_state_dict(first.state_dict())
            saved = collector.state_dict()
    replayed = Collector(collector.env, second, 0)
    replayed.load_state_dict(saved)
    for _ in range(2):
        second.update(replayed.collect())
    for mine, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_symmetries_are_chosen_and_combined_by_name():
    algorithm, _ = build("tensor:quadrotor")
    names = [image.name for image in algorithm.extensions.each[0].each]
    assert names == ["left-right", "front-back", "left-right and front-back"]
    algorithm, _ = build("tensor:quadrotor", use=("front-back",))
    assert [image.name for image in algorithm.extensions.each[0].each] == ["front-back"]
    with pytest.raises(ValueError, match=r"use names 'front': did you mean front-back\?"):
        build("tensor:quadrotor", use=("front",))
    with pytest.raises(ValueError, match=r"tensor:pendulum declares none; set algorithm\.extensions\[\]\.mirrors"):
        build("tensor:pendulum")


PENDULUM = {"name": "left-right", "obs": {"policy": {"sign": [1, -1, -1]}}, "action": {"sign": [-1]}}


def test_a_symmetry_can_be_declared_in_settings():
    plain = {"algorithm": {"extensions": [{"kind": "symmetry", "mirrors": [PENDULUM]}]}}
    config = from_plain(plain, canter.TrainConfig())
    assert from_plain(to_plain(config), canter.TrainConfig()) == config
    algorithm = config.algorithm.build(canter.EnvConfig(id="tensor:pendulum").build("cpu").spec, 0)
    assert isinstance(algorithm.extensions.each[0], Symmetries)


WRONG = {
    "no sign": ({"obs": {"policy": {"order": [0, 1, 2]}}}, "policy needs a mapping with sign"),
    "a zero": ({"obs": {"policy": {"sign": [1, 0, -1]}}}, r"sign\[1\]=0 must be 1 or -1"),
    "short": ({"obs": {"policy": {"sign": [1, -1]}}}, "observation group 'policy' has 3 components, its mirror 2"),
    "twice the same": ({"obs": {"policy": {"sign": [1, 1, 1], "order": [0, 0, 1]}}}, "component 2 is missing"),
    "no involution": ({"obs": {"policy": {"sign": [1, 1, 1], "order": [1, 2, 0]}}}, "does not return component 0"),
    "a turn": ({"obs": {"policy": {"sign": [1, -1, 1], "order": [1, 0, 2]}}}, "does not return component 0"),
    "group forgotten": ({"obs": {}}, "does not mirror observation group 'policy'"),
    "action too long": ({"action": {"sign": [1, 1]}}, "the action has 1 components, its mirror 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_declaration_of_the_wrong_form_is_refused_by_its_component(name):
    changed, message = WRONG[name]
    mirror = canter.MirrorConfig(**PENDULUM | changed)
    with pytest.raises(ValueError, match=message):
        build("tensor:pendulum", mirrors=(mirror,))


def test_bounds_that_are_not_mirrored_are_refused():
    env = canter.EnvConfig(id="tensor:swimmer", num_envs=2).build("cpu")
    spec = replace(env.spec, action=canter.Continuous(low=(-1.0, -1.0, -0.5), high=(1.0, 1.0, 1.0)))
    config = canter.PPOConfig(extensions=(canter.SymmetryConfig(),))
    with pytest.raises(ValueError, match=r"action component 2 has bounds -0\.5\.\.1\.0"):
        config.build(spec, 0)
    beta = replace(config, model=canter.ModelConfig(distribution="beta"))
    with pytest.raises(ValueError, match="or Beta cannot be mirrored"):
        beta.build(env.spec, 0)
    tanh = replace(config, model=canter.ModelConfig(distribution="tanh_gaussian"))
    tanh.build(env.spec, 0)


def test_a_function_can_mirror():
    env = canter.EnvConfig(id="tensor:swimmer", num_envs=4).build("cpu")
    (declared,) = env.spec.symmetries
    signs = torch.tensor(declared.obs["policy"].sign, dtype=torch.float32)
    function = canter.Symmetry("function", {"policy": lambda x: x * signs}, lambda x: -x)
    spec = replace(env.spec, symmetries=(function,))
    config = canter.PPOConfig(horizon=8, epochs=1, num_minibatches=2, extensions=(canter.SymmetryConfig(),))
    found = []
    for each in (spec, env.spec):
        algorithm = config.build(each, 0)
        algorithm.update(Collector(env, algorithm, 0).collect())
        found.append(torch.cat([p.detach().flatten() for p in algorithm.model.parameters()]))
    assert torch.equal(*found)
    wrong = replace(spec, symmetries=(replace(function, action=lambda x: 0.5 * x),))
    with pytest.raises(ValueError, match="mirroring the action twice does not return component 0"):
        config.build(wrong, 0)
