"""Every setting of SAC, of distillation and of the execution, varied one at a time: it has an effect or is named."""

import pytest
import torch

import canter
from canter.core.hints import config_keys
from canter.core.plain import from_plain, nest
from canter.envs.tensor import Pendulum
from canter.training.collector import Collector

NETWORK = {"hidden": [8], "activation": "relu", "init": "default", "normalize_obs": False}
SMALL = {"horizon": 2, "updates_per_transition": 0.5, "batch_size": 16, "warmup_steps": 24, "replay.capacity": 64}
SMALL |= {"policy": NETWORK, "critic": {"hidden": [8]}}
STACK = {"policy": {"kind": "stack", "hidden": [8], "blocks": 1}}
BLOCK = {"critic.blocks": 1}
ATOMS = {"critic.atoms": 11}
NORMALIZED = {"critic.normalize_obs": True}
SEEN = {"policy.normalize_obs": True}
NORM = {"policy.layer_norm": True}
IMAGES = {"policy.cnn.layers": [[2, 2, 1]]}

SAC = {
    "horizon": (4, {}),
    "updates_per_transition": (1.0, {}),
    "updates_per_step": (1.0, {}),
    "batch_size": (24, {}),
    "warmup_steps": (16, {}),
    "n_steps": (3, {}),
    "gamma": (0.9, {}),
    "tau": (0.1, {}),
    "pessimism": ("mean", {}),
    "policy_delay": (2, {}),
    "noise_repeat": (8, {}),
    "scale_rewards": (True, {}),
    "return_limit": (0.5, {"scale_rewards": True}),
    "temperature.initial": (0.1, {}),
    "temperature.learned": (False, {}),
    "temperature.target_entropy": (0.5, {}),
    "temperature.target_std": (0.15, {}),
    "policy_gain": (0.01, {}),
    "replay.capacity": (32, {}),
    "replay.dtype": ("bfloat16", {}),
    "std.kind": ("parameter", {}),
    "std.initial": (0.2, {}),
    "std.minimum": (0.9, {}),
    "std.maximum": (0.6, {"std.initial": 0.55}),
    "std.floor": (0.5, {}),
    "std.form": ("scalar", {"std.kind": "parameter"}),
    "std.learn": (False, {"std.kind": "parameter"}),
    "critic.hidden": ([5], {}),
    "critic.members": (3, {}),
    "critic.blocks": (1, {}),
    "critic.expansion": (2, BLOCK),
    "critic.norm": ("layer", {}),
    "critic.input_norm": ("batch", {}),
    "critic.output_norm": ("rms", {}),
    "critic.activation": ("tanh", {}),
    "critic.init": ("orthogonal", {}),
    "critic.normalize_obs": (True, {}),
    "critic.normalizer.clip": (0.1, NORMALIZED),
    "critic.normalizer.eps": (0.5, NORMALIZED),
    "critic.normalizer.eps_on": ("std", NORMALIZED | {"critic.normalizer.eps": 0.5}),
    "critic.normalizer.prior_count": (9.0, NORMALIZED),
    "critic.normalizer.variance": ("sample", NORMALIZED),
    "critic.precision": ("bfloat16", {}),
    "critic.atoms": (11, {}),
    "critic.support": ([-50.0, 0.0], ATOMS),
    "critic.obs_groups": (["other"], {}),
}
POLICY = {
    "policy.hidden": ([5], {}),
    "policy.activation": ("tanh", {}),
    "policy.init": ("default_zero_bias", {}),
    "policy.init_gain": (0.5, {"policy.init": "orthogonal"}),
    "policy.normalize_obs": (True, {}),
    "policy.normalizer.clip": (0.1, SEEN),
    "policy.normalizer.eps": (0.5, SEEN),
    "policy.normalizer.eps_on": ("std", SEEN | {"policy.normalizer.eps": 0.5}),
    "policy.normalizer.prior_count": (9.0, SEEN),
    "policy.normalizer.variance": ("sample", SEEN),
    "policy.precision": ("bfloat16", {}),
    "policy.layer_norm": (True, {}),
    "policy.layer_norm_position": ("after_activation", NORM),
    "policy.layer_norm_layers": ("first", NORM | {"policy.hidden": [8, 8]}),
    "policy.d2rl": (True, {"policy.hidden": [8, 8]}),
    "policy.obs_groups": (["other"], {}),
    "policy.blocks": (2, STACK),
    "policy.expansion": (2, STACK),
    "policy.norm": ("layer", STACK),
    "policy.input_norm": ("layer", STACK),
    "policy.output_norm": ("rms", STACK),
    "policy.rnn": ({"hidden": 4}, {}),
}
SAC |= POLICY
for prefix in ("optimizer.", "critic_optimizer.", "temperature.optimizer."):
    base = {f"{prefix}learning_rate": 0.01}
    SAC |= {
        f"{prefix}learning_rate": (0.02, base),
        f"{prefix}betas": ([0.5, 0.9], base),
        f"{prefix}eps": (0.1, base),
        f"{prefix}weight_decay": (0.5, base),
        f"{prefix}weight_decay_form": ("coupled", base | {f"{prefix}weight_decay": 0.5}),
        f"{prefix}max_grad_norm": (1e-3, base | {f"{prefix}eps": 0.1}),
    }

TEACHING = {"horizon": 8, "epochs": 1, "num_minibatches": 2, "sequence_length": 4, "policy": NETWORK}
RECURRENT = {"policy": NETWORK | {"rnn": {"hidden": 4}}}
LEARNED_STD = {"loss": "kl", "std.initial": 0.5, "optimizer.learning_rate": 0.1}
DISTILLATION = {
    "teacher": ("other", {}),
    "teacher_obs": ({"policy": "other"}, {}),
    "horizon": (16, {}),
    "epochs": (2, {}),
    "num_minibatches": (4, {}),
    "sequence_length": (2, RECURRENT),
    "loss": ("huber", {}),
    "mixture": (1.0, {}),
    "policy_gain": (1.0, {}),
    "std.kind": ("network", LEARNED_STD),
    "std.initial": (0.4, LEARNED_STD),
    "std.form": ("scalar", LEARNED_STD),
    "std.minimum": (1.9, LEARNED_STD | {"std.initial": 2.0}),
    "std.maximum": (0.51, LEARNED_STD),
    "std.floor": (0.3, LEARNED_STD),
    "std.learn": (False, LEARNED_STD),
    "policy.rnn.hidden": (5, RECURRENT),
    "policy.rnn.layers": (2, RECURRENT),
    "policy.rnn.cell": ("gru", RECURRENT),
    "policy.rnn.position": ("after_mlp", RECURRENT),
    "policy.rnn.layer_norm": (True, RECURRENT),
    "policy.rnn.concat_input": (True, RECURRENT),
    "policy.rnn.reset_on_end": (False, RECURRENT),
}
DISTILLATION |= {path: value for path, value in POLICY.items() if path != "policy.rnn"}
DISTILLATION |= {
    "optimizer.learning_rate": (0.1, {}),
    "optimizer.betas": ([0.5, 0.9], {}),
    "optimizer.eps": (0.1, {}),
    "optimizer.weight_decay": (0.5, {}),
    "optimizer.weight_decay_form": ("coupled", {"optimizer.weight_decay": 0.5}),
    "optimizer.max_grad_norm": (1e-3, {"optimizer.eps": 0.1}),
}
ELSEWHERE = (
    *("cnn.", "learning_rate.", "mixture."),
    *("policy.kind", "policy.module", "policy.arguments", "replay.save"),
)
"""Parts of other tables: images, schedules and kinds of networks act as in PPO; `replay.save` concerns checkpoints."""
WHOLE = {"policy", "critic", "optimizer", "critic_optimizer", "policy.rnn"}
"""Keys of a whole part, whose settings are varied."""


class Twice(Pendulum):  # pyright: ignore[reportGeneralTypeIssues]
    """A pendulum with a second group, of half the size of the first."""

    def __init__(self):
        super().__init__(4, "cpu", max_episode_steps=6)
        self.spec.obs["other"] = canter.TensorSpec((3,))

    def _observe(self, state):
        seen = super()._observe(state)
        return seen | {"other": 0.5 * seen["policy"]}


def settings(base, *changes):
    """Return nested settings; later changes win, and the parts that are given whole are merged by key."""
    flat = {}
    for change in (base, *changes):
        for key, value in change.items():
            inside = isinstance(value, dict) and key in WHOLE
            flat |= {f"{key}.{name}": part for name, part in value.items()} if inside else {key: value}
    return nest(flat, {})


def learn(config, engine, iterations):
    """Return all weights of an algorithm after some rollouts; statistics and learning rates do not count."""
    env = Twice()
    algorithm = config.build(env.spec, 0)
    algorithm.use_engine(engine)
    collector = Collector(env, algorithm, 0)
    for number in range(iterations):
        algorithm.set_progress(number / 20)
        algorithm.begin_iteration()
        algorithm.update(collector.collect())
    modules = algorithm.learner.modules().values() if isinstance(algorithm, canter.SAC) else [algorithm.actor]
    return [parameter.detach().clone() for module in modules for parameter in module.parameters()]


LEARNED = {}


def learn_once(config, engine, iterations):
    """Return what `learn` does, computed once for equal settings, which many tests start from."""
    key = repr((config, engine, iterations))
    if key not in LEARNED:
        LEARNED[key] = learn(config, engine, iterations)
    return LEARNED[key]


def differ(one, other):
    """Return whether two lists of weights are not the same to the bit."""
    return len(one) != len(other) or not all(map(torch.equal, one, other))


def effect(path, before, after, build, engine, iterations):
    """Return what changing a setting does: it changes what is learned, or is refused or listed by its name."""
    name = path.rpartition(".")[2]
    try:
        old = learn_once(build(before), engine, iterations)
        new = learn(build(after), engine, iterations)
    except ValueError as error:
        assert name in str(error) or "execution.engine" in str(error), error
        return "refused"
    if differ(old, new):
        return "changes"
    lines = build(after).unused(Twice().spec)
    assert any(line.startswith(f"algorithm.{path}") for line in lines), f"{path} has no effect and nobody says so"
    return "no effect"


@pytest.mark.parametrize("engine", ["auto", pytest.param("autograd", marks=pytest.mark.long)])
@pytest.mark.parametrize("path", SAC)
def test_no_setting_of_sac_is_silently_without_effect(path, engine):
    value, needed = SAC[path]
    before, after = settings(SMALL, needed), settings(SMALL, needed, {path: value})
    found = effect(path, before, after, lambda plain: from_plain(plain, canter.SACConfig()), engine, 7)
    assert found == "changes" or path == "policy.rnn"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Two policy files, one with other weights than the other."""
    folder = tmp_path_factory.mktemp("teachers")
    policy = canter.PPOConfig(horizon=4, num_minibatches=1).build(Pendulum(4).spec, 0).policy
    canter.save_policy(folder / "usual.safetensors", policy)
    for parameter in policy.actor.parameters():
        parameter.data.mul_(2)
    canter.save_policy(folder / "other.safetensors", policy)
    return folder


@pytest.mark.parametrize("path", DISTILLATION)
def test_no_setting_of_distillation_is_silently_without_effect(path, teachers):
    value, needed = DISTILLATION[path]
    value = str(teachers / "other.safetensors") if path == "teacher" else value
    base = TEACHING | {"teacher": str(teachers / "usual.safetensors")}
    before, after = settings(base, needed), settings(base, needed, {path: value})
    found = effect(path, before, after, lambda plain: from_plain(plain, canter.DistillationConfig()), "auto", 3)
    assert found == "changes"


@pytest.mark.parametrize(("config", "table"), [(canter.SACConfig, SAC), (canter.DistillationConfig, DISTILLATION)])
def test_every_setting_is_in_the_table(config, table):
    keys = {key for key in config_keys(config) if not any(part in f"{key}" for part in ELSEWHERE)}
    keys -= WHOLE
    if config is canter.SACConfig:
        keys = {key for key in keys if not key.startswith("policy.rnn.")}
    assert keys == set(table) - {"policy.rnn"}


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"tf32": False}, "execution.tf32=False has no effect here"),
        ({"rank_timeout": 7.0}, "execution.rank_timeout=7.0 has no effect here"),
        ({"mode": "graph"}, "execution.mode=graph has no effect"),
        ({"engine": "triton"}, "execution.engine=triton"),
    ],
)
def test_settings_of_the_execution_that_do_nothing_on_a_cpu_are_named(setting, named, caplog):
    config = from_plain(
        {
            "env": {"id": "tensor:cartpole", "num_envs": 4},
            "algorithm": {"horizon": 8, "num_minibatches": 1},
            "execution": setting,
            "total_steps": 32,
        },
        canter.TrainConfig(),
    )
    try:
        with canter.Trainer(config) as trainer:
            trainer.learn()
        said = caplog.text
    except ValueError as error:
        said = str(error)
    assert named in said


def test_threads_are_those_that_are_set():
    config = from_plain({"env": {"id": "tensor:cartpole"}, "execution": {"threads": 2}}, canter.TrainConfig())
    config.execution.start("cpu")
    assert torch.get_num_threads() == 2
