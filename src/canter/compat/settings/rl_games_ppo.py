"""rl_games' `config` section: PPO, the distribution of actions and the central value.

The tables are for `params.config` and settings below `algorithm`, unless a comment says otherwise.
"""

from __future__ import annotations

import math

from canter.compat.settings import readers as read
from canter.compat.settings.rl_games_network import CRITIC, DISTRIBUTION, NETWORK, POLICY, is_amp, is_continuous
from canter.compat.settings.rules import OFF, OMIT, Copy, Only, Rule, always, apply, mapped, no_effect, parity
from canter.compat.settings.section import NONE, Section

CONFIG = "params.config"
CENTRAL = f"{CONFIG}.central_value_config"
SIGMA = "params.network.space.continuous"
MIN_LR = 1e-6
VALUE_LOSS = {True: "clipped", False: "mse"}
NORMALIZER = {"eps": 1e-5, "eps_on": "variance", "clip": 5.0, "prior_count": 1.0}
"""rl_games' running mean and std: 1e-5 on the variance, clipped at 5, started with one sample of 0
+- 1."""


def set_normalizer(s: Section, setting: str) -> None:
    """Give a normalizer rl_games' constants, with parity."""
    if s.parity:
        for name, value in {**NORMALIZER, "variance": s.run.release.variance}.items():
            s.set(f"{setting}.{name}", value)


def minibatches(s: Section) -> None:
    """rl_games' setting is the size of a minibatch, which must divide the rollout there too."""
    # A central value has one sample for all agents of an environment.
    per_step = s.run.samples_per_step if s.at == CONFIG else s.run.settings.get("env.num_envs")
    if per_step is None:
        s.mapped("minibatch_size minibatch_size_per_env", "num_minibatches, once --num-envs is given")
        return
    horizon = s.run.settings["algorithm.horizon"]
    if s.has("minibatch_size"):
        key = "minibatch_size"
        size = read.integer(s, key)
        s.no_effect("minibatch_size_per_env", "minibatch_size wins")
    else:
        key = "minibatch_size_per_env"
        size = read.integer(s, key) * per_step
    total = horizon * per_step
    if size < 1 or total % size:
        divisors = {d for i in range(1, math.isqrt(total) + 1) if total % i == 0 for d in (i, total // i)}
        nearest = min(divisors, key=lambda divisor: abs(divisor - size))
        raise s.error(
            key,
            f"a number that divides horizon_length * num_actors (* agents) = {horizon} * {per_step} = {total}",
            f"use {nearest}, another --num-envs, or, for several agents, --agents N",
        )
    s.copy(key, "num_minibatches", total // size)


def surrogate(s: Section) -> None:
    """`ppo: False` wins over `use_smooth_clamp`."""
    clipped = "smooth_clipped" if read.flag(s, "use_smooth_clamp", False) else "clipped"
    s.set("surrogate", clipped if read.flag(s, "ppo", True) else "vanilla", "use_smooth_clamp")


def value_coef(s: Section) -> None:
    """The AMP agent's value loss is the square, of which PPO's here is half."""
    factor = 2 if is_amp(s.run) else 1
    s.copy("critic_coef", "value_coef", factor * read.number(s, "critic_coef"))


def entropy(s: Section) -> None:
    """Read the entropy coefficient, which decays only with a linear learning rate."""
    coef = read.number(s, "entropy_coef")
    if read.flag(s, "schedule_entropy", False) and s.raw("lr_schedule") == "linear":
        s.copy("schedule_entropy", "entropy_coef", {"kind": "linear", "start": coef, "end": 1e-4})
    else:
        s.copy("entropy_coef", "entropy_coef", coef)
        s.no_effect("schedule_entropy", "it needs lr_schedule: linear")


def bounds_loss(s: Section) -> None:
    """Unknown types are no loss in rl_games."""
    if not is_continuous(s.run):
        s.no_effect("bounds_loss_coef bound_loss_type", "only continuous actions have bounds")
        return
    form = {"bound": "soft", "regularisation": "regularisation"}.get(str(s.raw("bound_loss_type", "bound")))
    if form is None:
        why = "rl_games knows bound and regularisation and reads every other word as no loss"
        s.changed("bound_loss_type", why)
    elif s.has("bounds_loss_coef") and read.number(s, "bounds_loss_coef") > 0:
        s.set("bound_loss.coef", read.number(s, "bounds_loss_coef"), "bounds_loss_coef")
        s.set("bound_loss.form", form, "bound_loss_type")
    s.mapped("bounds_loss_coef", "algorithm.bound_loss.coef")


def learning_rate(s: Section) -> None:
    """Linear, adaptive by the KL, or constant; the rate of a central value never follows the KL."""
    rate = read.number(s, "learning_rate")
    schedule = s.raw("lr_schedule")
    if schedule == "adaptive" and s.at == CONFIG:
        adaptive_rate(s, rate)
    elif schedule == "linear" and not s.run.release.counts_frames and not s.run.settings.get("until.iterations"):
        s.set("optimizer.learning_rate", rate, "learning_rate")
        s.no_effect("lr_schedule", f"in rl_games {s.run.release.name} it falls by max_epochs only, which is not given")
    elif schedule == "linear":
        line = {"kind": "linear", "start": rate, "end": read.number(s, "min_lr", MIN_LR)}
        why = "rl_games counts iterations from 1, so it is one iteration ahead"
        s.copy("lr_schedule", "optimizer.learning_rate", line, why)
    else:
        s.set("optimizer.learning_rate", rate, "learning_rate")
        if schedule not in (*NONE, "fixed", "constant", "identity"):
            why = "rl_games reads every other word as constant, for a central value adaptive too"
            s.no_effect("lr_schedule", why)
    s.no_effect("kl_threshold schedule_type min_lr max_lr lr_multiplier", "only an adaptive rate reads it")


def adaptive_rate(s: Section, rate: float) -> None:
    """Read the adaptive learning rate, adapted by the minibatch or by the epoch."""
    kind = s.raw("schedule_type", "legacy")
    release = s.run.release
    if kind not in release.schedule_types and is_continuous(s.run):
        s.set("optimizer.learning_rate", rate, "learning_rate")
        s.changed("lr_schedule", f"with schedule_type: {kind} the rate never changes in rl_games {release.name}")
        s.no_effect("schedule_type", f"rl_games {release.name} has no {kind}; the rate stays as it is")
        return
    rate_section = s.inner("", "optimizer.learning_rate")
    rate_section.set("kind", "adaptive_kl")
    rate_section.set("start", rate, "learning_rate")
    apply(ADAPTIVE_RATE, rate_section)
    if kind == "standard" or not is_continuous(s.run):
        rate_section.copy("schedule_type", "every", "epoch")
    else:
        rate_section.set("every", "minibatch")
        otherwise = "reacts before each minibatch's step, to that minibatch's KL; rl_games after the step"
        rate_section.own_form("schedule_type", {"every": "step"}, otherwise)
    otherwise = "the exact KL(old || new) of the policy that acted; rl_games': another one, against a moving reference"
    s.own_form("lr_schedule", {"kl": "rl_games"}, otherwise)


def gradient_norm(s: Section) -> None:
    """`grad_norm` is read only with `truncate_grads`."""
    truncate = read.flag(s, "truncate_grads", False)
    s.set("optimizer.max_grad_norm", read.number(s, "grad_norm", 1.0) if truncate else math.inf, "grad_norm")
    if not truncate:
        s.no_effect("grad_norm", "truncate_grads is off")


def weight_decay(s: Section) -> None:
    """rl_games adds it to the gradient."""
    decay = read.number(s, "weight_decay", 0.0)
    if decay > 0:
        s.set("optimizer.weight_decay", decay, "weight_decay")
        otherwise = f"optimizer.weight_decay={decay:g}: decoupled from the gradient here"
        s.own_form("weight_decay", {"optimizer.weight_decay_form": "coupled"}, otherwise)


def sequences(s: Section) -> None:
    """rl_games reads `seq_length`; older files say `seq_len`, which it ignores."""
    root = s.run.root
    if not (root.has_section("params.network.rnn") or root.has_section(f"{CENTRAL}.network.rnn")):
        s.no_effect("seq_length seq_len zero_rnn_on_done", "the policy is not recurrent")
        return
    s.set("sequence_length", read.integer(s, "seq_length", 4), "seq_length")
    hint = "" if s.has("seq_length") else ": so this policy trained with 4. Did you mean seq_length?"
    s.no_effect("seq_len", f"rl_games ignores this key and uses seq_length, 4 where it is missing{hint}")
    resets = read.flag(s, "zero_rnn_on_done", True)
    for network in (POLICY, CRITIC):
        if f"{network}.rnn.cell" in s.run.settings:
            s.run.settings[f"{network}.rnn.reset_on_end"] = resets
    if not resets and f"{CRITIC}.rnn.cell" in s.run.settings:
        s.changed("zero_rnn_on_done", "rl_games' central value keeps its state in acting, but resets it in learning")


def advantages(s: Section) -> None:
    """Advantages are standardised over the rollout."""
    on = read.flag(s, "normalize_advantage", True)
    s.copy("normalize_advantage", "advantage_normalization", "rollout" if on else "none")
    if on:
        parity("advantage_std", "sample", "advantages are divided by the root of the mean square, not by n - 1")(s)


def bootstrap(s: Section) -> None:
    """rl_games bootstraps time-outs with the value of the observation before."""
    release = s.run.release
    if is_amp(s.run):
        s.no_effect("value_bootstrap", "the AMP agent always bootstraps, unless a step terminates")
    elif not read.flag(s, "value_bootstrap", release.value_bootstrap):
        s.set("bootstrap_truncated", False, "value_bootstrap")
        if not s.has("value_bootstrap"):
            why = f"value_bootstrap is off by default in rl_games {release.name}: a time-out counts as a termination"
            s.report("", "mapped", "algorithm.bootstrap_truncated=False", why)
    elif not s.parity:  # with parity the adapter's final_obs is unknown, as the Runner's is
        why = "uses the value of the true final observation if the environment shows it, else of the one before"
        s.changed("value_bootstrap", why, "algorithm.bootstrap_truncated=True")


def rewards(s: Section) -> None:
    """A logarithm needs a positive minimum."""
    shaper = s.inner("reward_shaper", "reward")
    apply(REWARD, shaper)
    if read.flag(shaper, "log_val", False):
        why = ""
        if not shaper.has("min_val"):
            shaper.set("minimum", 1e-8)
            why = "needs a positive minimum here, so reward.minimum=1e-8; rl_games computes NaN below 0"
        shaper.copy("log_val", "squash", "log", why)


def report_images(s: Section, network: str) -> None:
    """Report that images are not normalised here."""
    if s.run.root.has_section(f"{network}.cnn") and s.run.root.raw(f"{network}.cnn.type") != "conv1d":
        s.changed("normalize_input", "images are not normalised here; rl_games normalises each pixel")


def observation_normalizer(s: Section) -> None:
    """rl_games updates the statistics in every minibatch, up to 1.6.1 of the first epoch only."""
    on = read.flag(s, "normalize_input")
    s.run.settings[f"{POLICY}.normalize_obs"] = on
    if on:
        report_images(s, "params.network")
        timing = s.run.release.obs_statistics if is_continuous(s.run) else "minibatch"
        otherwise = "updated once an iteration, clipped at 10; rl_games' in every minibatch, clipped at 5"
        s.own_form("normalize_input", {"obs_statistics": timing}, otherwise)
        set_normalizer(s, "model.policy.normalizer")


def value_normalizer(s: Section) -> None:
    """rl_games normalises values without rescaling the last layer."""
    on = read.flag(s, "normalize_value", False)
    s.set("model.normalize_value", on)
    if on:
        otherwise = "the last layer is rescaled with the statistics (PopArt), so values do not jump"
        form = {"model.value_normalizer.rescale": False, "model.value_normalizer.of": "values_and_returns"}
        s.own_form("normalize_value", form, otherwise)
        set_normalizer(s, "model.value_normalizer")


ADAPTIVE_RATE: tuple[Rule, ...] = (
    Copy("kl_threshold", "target_kl", read.number),
    Copy("min_lr", "minimum", read.number, MIN_LR),
    Copy("max_lr", "maximum", read.number, 1e-2),
    Copy("lr_multiplier", "factor", read.number, 1.5),
)
OPTIMIZER: tuple[Rule, ...] = (always("optimizer.eps", 1e-8), learning_rate, gradient_norm, weight_decay)
REWARD: tuple[Rule, ...] = (
    Copy("shift_value", "shift", read.number, OMIT),
    Copy("scale_value", "scale", read.number, OMIT),
    Copy("min_val", "minimum", read.number, OMIT),
    Copy("max_val", "maximum", read.number, OMIT),
)


def central_value(s: Section) -> None:
    """Read the critic's network, loss and optimizer from the central value's section."""
    if not s.run.root.has_section(CENTRAL):
        return
    apply(NETWORK, s.run.section(f"{CENTRAL}.network", CRITIC))
    apply(CENTRAL_VALUE, s.inner("central_value_config", "central_value"))
    if s.run.agents > 1:
        s.set("central_value.agents", "first")
    if s.run.root.has_section(f"{CENTRAL}.network.rnn"):
        why = "one step of the recurrent state per observation; rl_games takes two on the last one of a rollout"
        if s.run.agents > 1:
            why += ", and trains with the episode ends of other worlds"
        s.own_form("", {"central_value.recurrence": "rl_games"}, why)
    key = "use_experimental_cv"
    trained = read.flag(s, key, is_continuous(s.run))
    shown = key if s.has(key) else ""
    if trained and read.flag(s.run.root, "params.network.separate", False):
        why = "the actor's own critic network is left out: with a central value it only shares the gradient norm"
        s.changed(shown, why)
    elif trained:
        otherwise = "only the central value is trained; rl_games also trains the actor's own value head"
        s.own_form(shown, {"central_value.actor_value": True}, otherwise)


def central_normalizer(s: Section) -> None:
    """Read whether the critic normalises its observations."""
    critic = s.run.section(s.at, CRITIC)
    on = read.flag(s, "normalize_input")
    if on:
        report_images(s, f"{CENTRAL}.network")
    critic.copy("normalize_input", "normalize_obs", on)
    if on:
        set_normalizer(critic, "normalizer")


CENTRAL_VALUE: tuple[Rule, ...] = (
    Copy("mini_epochs", "epochs", read.integer),
    minibatches,
    *OPTIMIZER,
    Copy("clip_value", "value_loss", read.flag, convert=VALUE_LOSS),
    Copy("e_clip", "value_clip", read.number, 0.2),
    always("value_coef", 2.0),  # rl_games' loss has neither a half nor a coefficient
    central_normalizer,
    no_effect("use_smooth_clamp", "no code reads it here"),
)
"""For `params.config.central_value_config` and settings below `algorithm.central_value`."""


def distribution(s: Section) -> None:
    """Read the distribution of continuous actions."""
    if is_continuous(s.run):
        apply(DISTRIBUTION, s.run.section(SIGMA, "algorithm.model"))


PPO: tuple[Rule, ...] = (
    Copy("gamma", "gamma", read.number),
    Copy("tau", "gae_lambda", read.number),
    Copy("horizon_length", "horizon", read.count),
    Copy("mini_epochs", "epochs", read.integer),
    minibatches,
    Copy("e_clip", "clip_ratio value_clip", read.number),
    surrogate,
    Copy("clip_value", "value_loss", read.flag, convert=VALUE_LOSS),
    value_coef,
    entropy,
    bounds_loss,
    *OPTIMIZER,
    advantages,
    Only("normalize_rms_advantage", OFF, "", "advantages are standardised over the rollout: set it to False"),
    no_effect("adv_rms_momentum", "normalize_rms_advantage is off"),
    bootstrap,
    rewards,
    observation_normalizer,
    value_normalizer,
    Only("freeze_critic", OFF, "", "nothing is frozen here: leave it out"),
    Copy("clip_actions", "model.bounds", read.flag, True, {True: "rescale", False: "none"}),
    mapped("use_action_masks", "the environment's group action_mask"),
    central_value,
    sequences,
    distribution,
    parity("shuffle", "none", "samples are reshuffled for each epoch; rl_games never shuffles"),
    no_effect(
        "rnd_config central_value_config1 ignore_dead_batches bptt_length network_path log_path is_train features"
    ),
    no_effect("num_warmup_steps num_seed_steps", "belongs to SAC"),
)
"""Everything that changes what is learned by PPO."""
