"""Vary every setting of the algorithm, one at a time: it changes the numbers, is refused, or is reported as unused.

`python tests/algorithms/test_settings_have_effect.py [cpu|cuda]` prints a table of docs/settings_table.md.
"""

import functools
import re
import sys
from dataclasses import replace

import pytest
import torch

import canter
from canter.core.hints import config_keys
from canter.core.plain import from_plain, nest
from canter.envs.tensor import Outcome, TensorEnv
from canter.training.collector import Collector

KINDS = {
    "continuous": canter.Continuous(low=(-2.0, -1.0), high=(3.0, 2.0)),
    "discrete": canter.Discrete(3),
    "multi_discrete": canter.MultiDiscrete((2, 3)),
}
ENGINES = {"cpu": ("autograd", "native"), "cuda": ("triton", "triton_layers")}
KINDS_ON = {"cpu": tuple(KINDS), "cuda": ("continuous",)}
"""Kinds of actions of the table of a device."""
BASE = {"horizon": 8, "epochs": 2, "num_minibatches": 2, "sequence_length": 4, "model.policy.hidden": [6, 5]}
RATE = "optimizer.learning_rate"
FAST = {RATE: 0.01}
LINEAR = {f"{RATE}.kind": "linear", f"{RATE}.start": 0.01}
ADAPTIVE = {f"{RATE}.kind": "adaptive_kl", f"{RATE}.start": 0.005}
MEMORY = {"model.policy.rnn.hidden": 4, "model.policy.rnn.cell": "lstm"} | FAST
IMAGES = {"images": True, "model.policy.cnn.layers": [[2, 2, 1]], "model.policy.cnn.features": 4} | FAST
SEQUENCES = IMAGES | {"images": "sequences"}
BOUND = {"bound_loss.form": "soft", "bound_loss.coef": 1.0, "bound_loss.limit": 0.01} | FAST
CURIOUS = {"curious": True, "bonus_value.gamma": 0.9} | FAST
STEP = {f"{RATE}.kind": "step", f"{RATE}.start": 0.01, f"{RATE}.end": 0.002}
STACK = {"model.policy.kind": "stack", "model.policy.blocks": 1} | FAST
CENTRAL = {"central_value.epochs": 2, "central_value.num_minibatches": 2} | FAST

# Every setting: what it is changed to, and what else must be set for it to have an effect.
VARIED = {
    "horizon": (16, {}),
    "epochs": (1, {}),
    "num_minibatches": (4, {}),
    "uneven_minibatches": ("drop", {}),
    "shuffle": ("rollout", {}),
    "shuffle_blocks": (2, {}),
    "sequence_length": (2, MEMORY),
    "reward.time": ("multiply", {}),
    "reward.shift": (0.5, {}),
    "reward.scale": (2.0, {"model.normalize_value": False}),
    "reward.minimum": (0.0, {}),
    "reward.maximum": (0.1, {}),
    "reward.squash": ("symlog", {}),
    "reward.centering": (0.5, {}),
    "reward.normalize": (True, {"model.normalize_value": False}),
    "objective": ("average", {}),
    "gamma": (0.8, {}),
    "discount_per": ("time", {}),
    "average_step": (0.5, {"objective": "average"}),
    "gae_lambda": (0.5, {}),
    "surrogate": ("vanilla", {}),
    "clip_ratio": (1e-4, {}),
    "value_loss": ("huber", {}),
    "value_clip": (0.02, {"value_loss": "clipped"}),
    "value_coef": (0.3, {"optimizer.max_grad_norm": 1e-3}),
    "entropy_coef": (0.5, {}),
    "bound_loss": ({"bound_loss.coef": 1.0, "bound_loss.limit": 0.01}, {}),
    "bound_loss.form": ("regularisation", BOUND),
    "bound_loss.coef": (5.0, BOUND),
    "bound_loss.limit": (0.001, BOUND),
    "advantage_normalization": ("minibatch", {}),
    "advantage_std": ("sample", {}),
    "bootstrap_truncated": (False, {}),
    "kl": ("rl_games", ADAPTIVE | {f"{RATE}.every": "step", f"{RATE}.target_kl": 1e-4}),
    "obs_statistics": ("minibatch", {}),
    "recompute_advantage": (True, {}),
    "target_kl": (1e-7, {}),
    "policy_average": (0.5, {}),
    "gradient_clipping": ("per_network", {"optimizer.max_grad_norm": 1e-3}),
    "model.policy.obs_groups": (["other"], {}),
    "model.policy.hidden": ([7], {}),
    "model.policy.activation": ("relu", {}),
    "model.policy.layer_norm": (True, {}),
    "model.policy.layer_norm_position": ("after_activation", {"model.policy.layer_norm": True}),
    "model.policy.layer_norm_layers": ("first", {"model.policy.layer_norm": True}),
    "model.policy.d2rl": (True, {}),
    "model.policy.blocks": (2, STACK),
    "model.policy.expansion": (2, STACK),
    "model.policy.norm": ("layer", STACK),
    "model.policy.input_norm": ("layer", STACK),
    "model.policy.output_norm": ("rms", STACK),
    "model.policy.init": ("default_zero_bias", {}),
    "model.policy.init_gain": (0.5, {}),
    "model.policy.normalize_obs": (False, {}),
    "model.policy.normalizer.eps": (0.1, {}),
    "model.policy.normalizer.eps_on": ("std", {"model.policy.normalizer.eps": 0.1}),
    "model.policy.normalizer.clip": (0.1, {}),
    "model.policy.normalizer.prior_count": (5.0, {}),
    "model.policy.normalizer.variance": ("sample", {}),
    "model.policy.precision": ("bfloat16", {}),
    "model.policy.cnn.kind": ("impala", IMAGES | {"model.policy.cnn.depths": [2]}),
    "model.policy.cnn.depths": ([3], IMAGES | {"model.policy.cnn.kind": "impala"}),
    "model.policy.cnn.activation": ("relu", IMAGES),
    "model.policy.cnn.sequences": (True, SEQUENCES),
    "model.policy.cnn.layers": ([[3, 2, 1]], IMAGES),
    "model.policy.cnn.features": (5, IMAGES),
    "model.policy.cnn.layout": ("channels_first", IMAGES | {"model.policy.cnn.layers": [[2, 1, 1]]}),
    "model.policy.rnn.cell": ("gru", MEMORY),
    "model.policy.rnn.hidden": (5, MEMORY),
    "model.policy.rnn.layers": (2, MEMORY),
    "model.policy.rnn.position": ("after_mlp", MEMORY),
    "model.policy.rnn.layer_norm": (True, MEMORY),
    "model.policy.rnn.concat_input": (True, MEMORY),
    "model.policy.rnn.reset_on_end": (False, MEMORY),
    "model.shared_trunk": (True, {}),
    "model.distribution": ("tanh_gaussian", {}),
    "model.bounds": ("clip", {}),
    "model.action_range": ([-0.5, 1.5], {}),
    "model.std.kind": ("network", {}),
    "model.std.form": ("scalar", {}),
    "model.std.initial": (0.5, {}),
    "model.std.minimum": (0.5, {}),
    "model.std.maximum": (2.0, {}),
    "model.std.floor": (0.1, {}),
    "model.std.learn": (False, FAST),
    "model.policy_gain": (0.5, {}),
    "model.value_gain": (0.5, {}),
    "model.normalize_value": (False, {}),
    "model.value_normalizer.eps": (0.5, {}),
    "model.value_normalizer.eps_on": ("std", {"model.value_normalizer.eps": 0.5}),
    "model.value_normalizer.clip": (0.1, {"model.value_normalizer.rescale": False}),
    "model.value_normalizer.prior_count": (9.0, {}),
    "model.value_normalizer.variance": ("sample", {}),
    "model.value_normalizer.rescale": (False, {}),
    "model.value_normalizer.of": ("values_and_returns", {}),
}
for prefix, base in (("optimizer.", FAST), ("critic_optimizer.", FAST), ("central_value.optimizer.", CENTRAL)):
    base = {**base, f"{prefix}learning_rate": 0.01}
    VARIED |= {
        f"{prefix}learning_rate": (0.02, base),
        f"{prefix}betas": ([0.5, 0.9], base),
        f"{prefix}eps": (0.1, base),
        f"{prefix}weight_decay": (0.5, base),
        f"{prefix}weight_decay_form": ("coupled", {**base, f"{prefix}weight_decay": 0.5}),
        f"{prefix}max_grad_norm": (1e-3, {**base, f"{prefix}eps": 0.1}),
    }
VARIED |= {
    f"{RATE}.kind": ("adaptive_kl", LINEAR),
    f"{RATE}.start": (0.02, LINEAR),
    f"{RATE}.end": (0.005, LINEAR),
    f"{RATE}.begin_at": (0.4, LINEAR),
    f"{RATE}.end_at": (0.4, LINEAR),
    f"{RATE}.target_kl": (1e-8, ADAPTIVE),
    f"{RATE}.every": ("minibatch", ADAPTIVE),
    f"{RATE}.factor": (3.0, ADAPTIVE),
    f"{RATE}.minimum": (0.005, {**ADAPTIVE, f"{RATE}.target_kl": 1e-8}),
    f"{RATE}.maximum": (0.0051, {**ADAPTIVE, f"{RATE}.target_kl": 10.0}),
    "critic_optimizer": ({"critic_optimizer.learning_rate": 0.02}, {}),
    "central_value": ({"central_value.epochs": 3, "central_value.num_minibatches": 1}, {}),
    "central_value.epochs": (3, CENTRAL),
    "central_value.num_minibatches": (1, CENTRAL),
    "central_value.value_loss": ("huber", CENTRAL),
    "central_value.value_clip": (1e-4, {**CENTRAL, "central_value.value_loss": "clipped"}),
    "central_value.value_coef": (0.3, {**CENTRAL, "central_value.optimizer.max_grad_norm": 1e-3}),
    "central_value.actor_value": (True, CENTRAL),
    "central_value.agents": ("first", {"agents": 2} | CENTRAL),
    "central_value.recurrence": ("rl_games", MEMORY | CENTRAL),
    "bonus_value": ({"bonus_value.gamma": 0.9}, {"curious": True}),
    "bonus_value.gamma": (0.5, CURIOUS),
    "bonus_value.gae_lambda": (0.5, CURIOUS),
    "bonus_value.episodic": (True, CURIOUS),
    "bonus_value.advantage_coef": (5.0, CURIOUS),
    "bonus_value.value_coef": (0.3, CURIOUS | {"optimizer.max_grad_norm": 1e-3}),
    f"{RATE}.at": (0.2, STEP),
}
NOT_VARIED = {
    "extensions": "what an extension changes is its own; see tests/engines/test_seam.py",
    "model.policy": "one key for a whole network",
    "model.critic": "one key for a whole network",
    "model.policy.kind": "kinds of networks are registered by users",
    "model.policy.module": "a network of the user's own",
    "model.policy.arguments": "a network of the user's own",
    "model.policy.rnn": "one key for all of memory",
}


class Small(TensorEnv):
    """Reaches after a target; steps take various times, episodes end both ways."""

    def __init__(self, action, images, device, agents=1):
        shape = {"sequences": (5, 5), True: (5, 5, 1)}.get(images, (2,))
        obs = {"policy": canter.TensorSpec(shape), "other": canter.TensorSpec((1,))}
        super().__init__("test:small", 4, device, obs, action, max_episode_steps=5, durations=True)
        self.spec = replace(self.spec, num_agents=agents)

    def _sample_state(self):
        return {"x": self._uniform(-1.0, 1.0), "v": self._uniform(-1.0, 1.0)}

    def _advance(self, state, action):
        push = action.float().reshape(len(action), -1).sum(-1)
        x = state["x"] + 0.3 * push - 0.2 * state["v"]
        after = {"x": x, "v": 0.9 * state["v"] + 0.1 * push}
        return Outcome(after, 1.0 - x.square(), x.abs() > 2.0, info={"duration": 0.5 + state["v"].abs()})

    def _observe(self, state):
        both = torch.stack([state["x"], state["v"]], -1)
        shape = self.spec.obs["policy"].shape
        pixels = torch.arange(25.0, device=both.device)
        seen = both if len(shape) == 1 else torch.sin(pixels * both.sum(-1, keepdim=True)).view(-1, *shape)
        return {"policy": seen, "other": both[:, :1]}


def flat(settings):
    given = {key: value for key, value in settings.items() if key not in ("images", "curious", "agents")}
    rnd = (canter.RNDConfig(hidden=(4,), num_minibatches=2),) if settings.get("curious") else ()
    return from_plain(nest(given, {}), canter.PPOConfig(extensions=rnd))


@functools.cache
def _trained(kind, engine, settings, device):
    settings = dict(settings)
    config, env = flat(settings), Small(KINDS[kind], settings.get("images", False), device, settings.get("agents", 1))
    algorithm = config.build(env.spec, 0)
    algorithm.use_engine(engine)
    collector = Collector(env, algorithm, 0)
    for number in range(2):
        algorithm.set_progress(number / 4)
        algorithm.update(collector.collect())
    shapes = tuple(parameter.shape for parameter in algorithm.model.parameters())
    numbers = [*algorithm.model.parameters(), *algorithm.policy.actor.parameters()]
    numbers += [env.step(algorithm.act(*seen(collector))[0]).reward]
    return shapes, torch.cat([tensor.detach().double().flatten() for tensor in numbers])


def seen(collector):
    rollout = collector.rollout
    return rollout.obs_at(rollout.horizon), collector.state, rollout.reset[rollout.horizon]


def trained(kind, engine, settings, device="cpu"):
    """Shapes of the parameters, and all numbers after two updates with what a step then earns."""
    return _trained(kind, engine, tuple(sorted((key, _hashable(value)) for key, value in settings.items())), device)


def _hashable(value):
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def varied(path):
    """Settings before and after the change of one."""
    value, needed = VARIED[path]
    before = BASE | (needed or FAST) | ({} if needed.keys() & {RATE, f"{RATE}.kind"} else FAST)
    return before, before | (value if isinstance(value, dict) else {path: value})


def verdict(path, kind, engine, device="cpu"):
    """Return the result of varying a setting: changes, refused, no effect, or unsupported by the engine."""
    before, after = varied(path)
    try:
        old = trained(kind, engine, before, device)
        new = trained(kind, engine, after, device)
    except ValueError as error:
        if "execution.engine" in str(error):
            return "unsupported"
        return "refused" if names_the_setting(str(error), path) else f"refused without its name: {error}"
    if old[0] != new[0] or not torch.equal(old[1], new[1]):
        return "changes"
    env = Small(KINDS[kind], after.get("images", False), device)
    said = [line for line in flat(after).unused(env.spec) if line.startswith(f"algorithm.{path}")]
    return "no effect" if said else "SILENT"


def names_the_setting(message, path):
    """Return whether a refusal names the setting, or the optional part that it belongs to, by its whole key."""
    owner = path.rpartition(".")[0]
    keys = (path, owner) if owner in VARIED else (path,)
    return any(re.search(rf"\b{re.escape(key)}\b", message) for key in keys)


def test_every_setting_is_in_the_table():
    keys = {key.replace("model.critic.", "model.policy.") for key in config_keys(canter.PPOConfig)}
    # A schedule has the same settings wherever it stands, and the value of a constant one is the number itself.
    schedule = {key.removeprefix(RATE) for key in keys if key.startswith(RATE + ".")}
    for owner in ("entropy_coef", "critic_optimizer.learning_rate", "central_value.optimizer.learning_rate"):
        keys -= {owner + name for name in schedule}
    assert keys - set(VARIED) - set(NOT_VARIED) == {f"{RATE}.value"}


def usual_kinds():
    """Every setting with continuous actions, and every fourth one with another kind too; the rest is long."""
    for number, path in enumerate(VARIED):
        usual = {"continuous", {1: "discrete", 5: "multi_discrete"}.get(number % 8)}
        for kind in KINDS:
            yield pytest.param(path, kind, marks=[] if kind in usual else pytest.mark.long)


@pytest.mark.parametrize(("path", "kind"), [*usual_kinds()])
def test_no_setting_is_silently_without_effect_and_the_effect_is_that_of_the_definition(path, kind):
    compare(path, kind, "native", "cpu")


@pytest.fixture
def tf32():
    """Let products be rounded to TF32, without which the engine `triton` does not run."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("engine", ENGINES["cuda"])
@pytest.mark.parametrize("path", VARIED)
def test_the_same_holds_for_the_engines_of_a_gpu(path, engine):
    compare(path, "continuous", engine, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("engine", ENGINES["cuda"])
def test_engines_of_a_gpu_support_the_settings_that_are_varied(engine):
    assert verdict("gamma", "continuous", engine, "cuda") == "changes"


def compare(path, kind, engine, device):
    """Raise an error if a setting is ignored by the definition or an engine, or has another effect in the engine."""
    defined, found = verdict(path, kind, "autograd", device), verdict(path, kind, engine, device)
    assert {defined, found} <= {"changes", "refused", "no effect", "unsupported"}
    if found == "unsupported":
        return
    assert found == defined
    if found != "changes":
        return
    mine, theirs = (trained(kind, name, varied(path)[1], device)[1] for name in (engine, "autograd"))
    # Two updates amplify rounding; a setting that one engine ignored would differ by the size of a step, 0.01.
    assert (mine - theirs).abs().median() < 1e-4


def columns(device):
    return [(kind, engine) for kind in KINDS_ON[device] for engine in ENGINES[device]]


def header(device):
    return "| setting | " + " | ".join(", ".join(column) for column in columns(device)) + " |"


def row(path, device):
    """Return the verdicts on a setting, for each kind of action and each engine of the device."""
    return [verdict(path, kind, engine, device) for kind, engine in columns(device)]


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.set_float32_matmul_precision("highest" if device == "cpu" else "high")
    print(header(device))
    print("| --- |" + " --- |" * len(columns(device)))
    for path in VARIED:
        verdicts = row(path, device)
        if set(verdicts) != {"changes"}:
            print(f"| `{path}` | {' | '.join(verdicts)} |", flush=True)
