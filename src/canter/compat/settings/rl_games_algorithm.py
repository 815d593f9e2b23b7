"""rl_games' `config` section: the algorithm."""

from __future__ import annotations

import math

from canter.compat.settings.rl_games_network import OTHER_START, STARTS, Place, translate_network
from canter.compat.settings.translation import NONE, Translation

CONFIG = "params.config"
POLICY, CRITIC = "algorithm.model.policy", "algorithm.model.critic"
OPTIMIZER = "algorithm.optimizer"
CENTRAL = f"{CONFIG}.central_value_config"
MIN_LR, MAX_LR = 1e-6, 1e-2
LINEAR_FLOOR = 1e-3
"""What rl_games' linear form of the deviation has for a floor where the file has less."""


def translate_algorithm(t: Translation, rows: int | None, continuous: bool, recurrent: bool) -> None:
    """Everything that changes what is learned; `rows` is the number of environments times agents, if known."""
    central = t.section(CENTRAL)
    for key, setting in (("gamma", "gamma"), ("tau", "gae_lambda")):
        t.to(f"{CONFIG}.{key}", f"algorithm.{setting}", t.number(f"{CONFIG}.{key}"))
    horizon = t.count(f"{CONFIG}.horizon_length")
    t.to(f"{CONFIG}.horizon_length", "algorithm.horizon", horizon)
    t.to(f"{CONFIG}.mini_epochs", "algorithm.epochs", t.integer(f"{CONFIG}.mini_epochs"))
    _minibatches(t, CONFIG, "algorithm.num_minibatches", horizon, rows)
    _loss(t, continuous)
    _optimizer(t, CONFIG, OPTIMIZER, continuous, adaptive=True)
    _sequences(t, recurrent)
    _advantages(t)
    _normalizers(t)
    if central:
        _central_value(t, horizon, rows, continuous)
    if continuous:
        _standard_deviation(t)
    t.choose("samples are shuffled anew for each epoch; rl_games never shuffles", "algorithm.shuffle", "none")
    t.dead("no code reads it", *(f"{CONFIG}.{name}" for name in _DEAD))


_DEAD = (
    "rnd_config",
    "central_value_config1",
    "ignore_dead_batches",
    "bptt_length",
    "network_path",
    "log_path",
    "is_train",
    "features",
)


def _minibatches(t: Translation, at: str, setting: str, horizon: int, rows: int | None) -> None:
    """A number of minibatches from the size of one, which must divide the rollout in the parent too."""
    size, per_env = f"{at}.minibatch_size", f"{at}.minibatch_size_per_env"
    if rows is None:
        return  # the number of environments was refused
    if t.has(size):
        wanted, key = t.integer(size), size
        t.dead("minibatch_size wins", per_env)
    else:
        wanted, key = t.integer(per_env) * rows, per_env
    if wanted < 1 or (horizon * rows) % wanted:
        near = _nearest_divisor(horizon * rows, wanted)
        raise t.error(
            key,
            f"a number that divides horizon_length * num_actors (* agents) = {horizon} * {rows} = {horizon * rows}",
            f"use {near}, another --num-envs, or, for several agents, --agents N",
        )
    t.to(key, setting, horizon * rows // wanted)


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = {d for i in range(1, math.isqrt(number) + 1) if number % i == 0 for d in (i, number // i)}
    return min(divisors, key=lambda divisor: abs(divisor - wanted))


def _loss(t: Translation, continuous: bool) -> None:
    clip = t.number(f"{CONFIG}.e_clip")
    t.to(f"{CONFIG}.e_clip", "algorithm.clip_ratio", clip)
    smooth = t.flag(f"{CONFIG}.use_smooth_clamp", False)
    surrogate = "smooth_clipped" if smooth else "clipped"
    if not t.flag(f"{CONFIG}.ppo", True):
        surrogate = "vanilla"
    t.judge(f"{CONFIG}.ppo", "mapped", f"algorithm.surrogate={surrogate}")
    t.to(f"{CONFIG}.use_smooth_clamp", "algorithm.surrogate", surrogate)
    t.put("algorithm.value_clip", clip)
    clipped = t.flag(f"{CONFIG}.clip_value")
    t.to(f"{CONFIG}.clip_value", "algorithm.value_loss", "clipped" if clipped else "mse")
    t.to(f"{CONFIG}.critic_coef", "algorithm.value_coef", t.number(f"{CONFIG}.critic_coef"))
    entropy = t.number(f"{CONFIG}.entropy_coef")
    if t.flag(f"{CONFIG}.schedule_entropy", False) and t.raw(f"{CONFIG}.lr_schedule") == "linear":
        line = {"kind": "linear", "start": entropy, "end": 1e-4}
        t.to(f"{CONFIG}.schedule_entropy", "algorithm.entropy_coef", line)
        t.judge(f"{CONFIG}.entropy_coef", "mapped", "algorithm.entropy_coef.start")
    else:
        t.to(f"{CONFIG}.entropy_coef", "algorithm.entropy_coef", entropy)
        t.dead("it needs lr_schedule: linear", f"{CONFIG}.schedule_entropy")
    _bounds_loss(t, continuous)


def _bounds_loss(t: Translation, continuous: bool) -> None:
    coef, form = f"{CONFIG}.bounds_loss_coef", f"{CONFIG}.bound_loss_type"
    if not continuous:
        t.dead("only continuous actions have bounds", coef, form)
        return
    forms = {"bound": "soft", "regularisation": "regularisation"}
    kind = str(t.raw(form, "bound"))
    if kind not in forms:
        t.judge(form, "differs", why="rl_games knows bound and regularisation and reads every other word as no loss")
    elif t.has(coef) and t.number(coef) > 0:
        t.to(coef, "algorithm.bound_loss.coef", t.number(coef))
        t.put("algorithm.bound_loss.form", forms[kind], form)
        t.judge(form, "mapped", f"algorithm.bound_loss.form={forms[kind]}")
    t.judge(coef, "mapped", "algorithm.bound_loss=null")
    t.judge(form, "mapped", "algorithm.bound_loss=null")


def _optimizer(t: Translation, at: str, to: str, continuous: bool, adaptive: bool) -> None:
    rate = t.number(f"{at}.learning_rate")
    t.put(f"{to}.eps", 1e-8)
    schedule = t.raw(f"{at}.lr_schedule")
    if schedule == "adaptive" and adaptive:
        _adaptive_rate(t, at, to, rate, continuous)
    elif schedule == "linear":
        lowest = t.number(f"{at}.min_lr", MIN_LR)
        why = "the parent counts iterations from 1, so it is one iteration ahead"
        t.to(f"{at}.lr_schedule", f"{to}.learning_rate", {"kind": "linear", "start": rate, "end": lowest}, why)
    else:
        t.put(f"{to}.learning_rate", rate, f"{at}.learning_rate")
        known = schedule in (*NONE, "fixed", "constant", "identity")
        why = "" if known else "rl_games knows adaptive and linear and reads every other word as constant"
        t.judge(f"{at}.lr_schedule", "mapped" if known else "dead", f"{to}.learning_rate stays", why)
    t.judge(f"{at}.learning_rate", "mapped", f"{to}.learning_rate={rate:g}")
    t.dead("only an adaptive rate reads it", *(f"{at}.{name}" for name in _ADAPTIVE))
    truncate = t.flag(f"{at}.truncate_grads", False)
    norm = t.number(f"{at}.grad_norm", 1.0) if truncate else math.inf
    t.put(f"{to}.max_grad_norm", norm, f"{at}.grad_norm")
    t.judge(f"{at}.truncate_grads", "mapped", f"{to}.max_grad_norm={norm:g}")
    t.judge(f"{at}.grad_norm", "mapped" if truncate else "dead", f"{to}.max_grad_norm={norm:g}")
    decay = t.number(f"{at}.weight_decay", 0.0)
    if decay > 0:
        t.put(f"{to}.weight_decay", decay, f"{at}.weight_decay")
        ours = f"{to}.weight_decay={decay:g}: decoupled from the gradient here"
        t.choose(ours, f"{to}.weight_decay_form", "coupled", f"{at}.weight_decay")
    t.judge(f"{at}.weight_decay", "mapped", f"{to}.weight_decay=0")


_ADAPTIVE = ("kl_threshold", "schedule_type", "min_lr", "max_lr", "lr_multiplier")


def _adaptive_rate(t: Translation, at: str, to: str, rate: float, continuous: bool) -> None:
    kind = t.raw(f"{at}.schedule_type", "legacy")
    if kind == "standard_epoch":
        t.put(f"{to}.learning_rate", rate, f"{at}.learning_rate")
        t.judge(
            f"{at}.lr_schedule", "differs", why="with schedule_type: standard_epoch the rate never moves in rl_games"
        )
        t.judge(f"{at}.schedule_type", "dead", why="rl_games has no standard_epoch; the rate stays as it is")
        return
    every = "epoch" if kind == "standard" or not continuous else "minibatch"
    setting = f"{to}.learning_rate"
    t.put(f"{setting}.kind", "adaptive_kl")
    t.put(f"{setting}.start", rate, f"{at}.learning_rate")
    t.to(f"{at}.kl_threshold", f"{setting}.target_kl", t.number(f"{at}.kl_threshold"))
    for name, ours, usual in (("min_lr", "minimum", MIN_LR), ("max_lr", "maximum", MAX_LR)):
        t.to(f"{at}.{name}", f"{setting}.{ours}", t.number(f"{at}.{name}", usual))
    t.to(f"{at}.lr_multiplier", f"{setting}.factor", t.number(f"{at}.lr_multiplier", 1.5))
    t.put(f"{setting}.every", every)
    if every == "epoch":
        t.judge(f"{at}.schedule_type", "mapped", f"{setting}.every=epoch")
    else:
        ours = "reacts before each minibatch's step, to that minibatch's KL; rl_games after the step"
        t.choose(ours, f"{setting}.every", "step", f"{at}.schedule_type")
    ours = (
        "the exact KL(old || new) of the policy that acted; rl_games measures another one, against a moving reference"
    )
    t.choose(ours, "algorithm.kl", "rl_games", f"{at}.lr_schedule")


def _sequences(t: Translation, recurrent: bool) -> None:
    length, old = f"{CONFIG}.seq_length", f"{CONFIG}.seq_len"
    if not recurrent:
        t.dead("there is no memory", length, old, f"{CONFIG}.zero_rnn_on_done")
        return
    t.put("algorithm.sequence_length", t.integer(length, 4), length)
    t.judge(length, "mapped", "algorithm.sequence_length")
    why = "rl_games ignores this key and uses seq_length, 4 where it is missing"
    t.judge(
        old, "dead", why=why if t.has(length) else f"{why}: so this policy trained with 4. Did you mean seq_length?"
    )
    resets = t.flag(f"{CONFIG}.zero_rnn_on_done", True)
    for network in (POLICY, CRITIC):
        if f"{network}.memory.cell" in t.settings:
            t.put(f"{network}.memory.reset_on_end", resets)
    t.judge(f"{CONFIG}.zero_rnn_on_done", "mapped", f"{POLICY}.memory.reset_on_end={resets}")


def _advantages(t: Translation) -> None:
    on = t.flag(f"{CONFIG}.normalize_advantage", True)
    t.to(f"{CONFIG}.normalize_advantage", "algorithm.advantage_normalization", "rollout" if on else "none")
    if on:
        t.choose(
            "advantages are divided by the root of the mean square, not by n - 1", "algorithm.advantage_std", "sample"
        )
    rms = f"{CONFIG}.normalize_rms_advantage"
    if t.raw(rms) is True:
        t.refuse(rms, "advantages are standardised over the rollout: set it to False")
    t.judge(rms, "mapped")
    t.dead("normalize_rms_advantage is off", f"{CONFIG}.adv_rms_momentum")
    bootstrap = f"{CONFIG}.value_bootstrap"
    if not t.flag(bootstrap, True):
        t.to(bootstrap, "algorithm.bootstrap_truncated", False)
    elif t.parity:
        t.judge(bootstrap, "mapped", "the adapter's final_obs: unknown, as the Runner's is")
    else:
        why = "the value of the true last observation where the environment shows it, of the one before where not"
        t.judge(bootstrap, "differs", "algorithm.bootstrap_truncated=True", why)
    shaper = f"{CONFIG}.reward_shaper"
    for key, setting in (
        ("shift_value", "shift"),
        ("scale_value", "scale"),
        ("min_val", "minimum"),
        ("max_val", "maximum"),
    ):
        if t.has(f"{shaper}.{key}"):
            t.to(f"{shaper}.{key}", f"algorithm.reward.{setting}", t.number(f"{shaper}.{key}"))
    if t.flag(f"{shaper}.log_val", False):
        why = ""
        if not t.has(f"{shaper}.min_val"):
            t.put("algorithm.reward.minimum", 1e-8)
            why = "needs a positive minimum here, so reward.minimum=1e-8; rl_games gives NaN below 0"
        t.to(f"{shaper}.log_val", "algorithm.reward.squash", "log", why)
    t.judge(f"{shaper}.log_val", "mapped", "algorithm.reward.squash=none")
    if not t.section(shaper):
        t.judge(shaper, "mapped", "algorithm.reward")


def _normalizers(t: Translation) -> None:
    on = t.flag(f"{CONFIG}.normalize_input")
    t.put(f"{POLICY}.normalize_obs", on)
    if on:
        ours = "moves once an iteration after learning, clipped at 10; rl_games' in every minibatch, clipped at 5"
        t.choose(ours, "algorithm.obs_statistics", "minibatch", f"{CONFIG}.normalize_input")
        normalizer_form(t, f"{POLICY}.normalizer")
    t.judge(f"{CONFIG}.normalize_input", "mapped", f"{POLICY}.normalize_obs={on}")
    values = t.flag(f"{CONFIG}.normalize_value", False)
    t.put("algorithm.model.normalize_value", values)
    if values:
        ours = "the last layer is rescaled with the statistics (PopArt), so that no value moves"
        t.choose(ours, "algorithm.model.value_normalizer.rescale", False, f"{CONFIG}.normalize_value")
        if t.parity:
            t.choose("", "algorithm.model.value_normalizer.of", "values_and_returns")
            normalizer_form(t, "algorithm.model.value_normalizer")
    t.judge(f"{CONFIG}.normalize_value", "mapped", f"algorithm.model.normalize_value={values}")
    if t.raw(f"{CONFIG}.freeze_critic") is True:
        t.refuse(f"{CONFIG}.freeze_critic", "nothing is frozen here: leave it out")
    t.judge(f"{CONFIG}.freeze_critic", "mapped")


def normalizer_form(t: Translation, setting: str) -> None:
    """rl_games' running mean and deviation: 1e-5 on the variance, cut off at 5, begun with one row of 0 +- 1."""
    if t.parity:
        for name, value in (("eps", 1e-5), ("eps_on", "variance"), ("clip", 5.0), ("prior_count", 1.0)):
            t.choose(f"{setting}.{name} is Canter's", f"{setting}.{name}", value)


def _standard_deviation(t: Translation) -> None:
    space = "params.network.space.continuous"
    for name in ("mu_activation", "sigma_activation"):
        if t.raw(f"{space}.{name}") not in NONE:
            t.refuse(f"{space}.{name}", "the mean and the deviation have no activation here: set it to None")
        t.judge(f"{space}.{name}", "mapped")
    start = t.raw(f"{space}.sigma_init.val", t.raw(f"{space}.sigma_init.value"))
    key = f"{space}.sigma_init.val" if t.raw(f"{space}.sigma_init.val") is not None else f"{space}.sigma_init.value"
    form, floor = _form(t, space)
    raw = t.number(key, 0.0) if start is not None else 0.0
    initial = floor + (math.exp(raw) if form == "log" else math.log1p(math.exp(raw - floor * (form == "linear"))))
    t.put("algorithm.model.std.initial", initial, key)
    t.judge(key, "mapped", f"algorithm.model.std.initial={initial:.4g}")
    constant = t.raw(f"{space}.sigma_init.name", "const_initializer") in ("const_initializer", "default")
    why = "" if constant else f"begins at a constant; {OTHER_START}"
    to = f"algorithm.model.std.initial={initial:.4g}"
    t.each(f"{space}.sigma_init", STARTS, "mapped" if constant else "differs", to, why)
    kind = "parameter" if t.flag(f"{space}.fixed_sigma", True) else "network"
    t.put("algorithm.model.std.kind", kind)
    if not _std_bounds(t, space, form):
        ours = "keeps between 0.01 and 10, with a gradient everywhere; rl_games' is exp(parameter), without bounds"
        t.choose(ours, "algorithm.model.std.form", form, f"{space}.fixed_sigma")
        if floor and t.parity:
            t.put("algorithm.model.std.floor", floor)
            t.judge(f"{space}.min_sigma", "mapped", f"algorithm.model.std.floor={floor:g}")
    t.judge(f"{space}.fixed_sigma", "mapped", f"algorithm.model.std.kind={kind}")
    if "algorithm.model.std.form" in t.settings:
        t.judge(f"{space}.sigma_parametrization", "mapped", f"algorithm.model.std.form={form}")
    t.judge(f"{space}.sigma_parametrization", "differs", f"algorithm.model.std.form={form}", "with --parity only")
    if floor and t.has(f"{space}.min_sigma"):
        t.to(f"{space}.min_sigma", "algorithm.model.std.minimum", floor, "a bound that is approached, not added")
    for name in ("min_sigma", "max_sigma", "logstd_bounds"):
        t.judge(f"{space}.{name}", "mapped", "off")
    learn = f"{space}.learn_sigma"
    if t.has(learn):
        t.to(learn, "algorithm.model.std.learn", t.flag(learn))
    mean = f"{space}.mu_init"
    if t.raw(f"{mean}.name") not in (None, "default"):
        gain = t.number(f"{mean}.gain", t.number(f"{mean}.scale", t.number(f"{mean}.std", 1.0)))
        t.put("algorithm.model.policy_gain", gain)
        t.each(mean, STARTS, "differs", f"algorithm.model.policy_gain={gain:g}", OTHER_START)
    t.each(mean, STARTS, "mapped", "algorithm.model.policy_gain")
    t.dead("no code reads it", f"{space}.scale")


def _form(t: Translation, space: str) -> tuple[str, float]:
    """What rl_games' learned number is, and what is added to the deviation."""
    key = f"{space}.sigma_parametrization"
    form = {"exp": "log", "softplus": "softplus", "linear": "linear", "scalar": "linear"}.get(t.raw(key, "exp"))
    if form is None:
        t.refuse(key, "exp, softplus, linear and scalar are known")
    floor = t.number(f"{space}.min_sigma", 0.0) if t.has(f"{space}.min_sigma") else 0.0
    return form or "log", max(floor, LINEAR_FLOOR) if form == "linear" else floor


def _std_bounds(t: Translation, space: str, form: str) -> bool:
    """Bounds of the deviation, which only Canter's own form has: whether there are any."""
    bounds, most = f"{space}.logstd_bounds", f"{space}.max_sigma"
    if form != "log":
        t.dead("only sigma_parametrization: exp reads it", bounds)
    elif t.has(bounds):
        low, high = t.pair(bounds, "two numbers, such as [-5, 2]")
        t.put("algorithm.model.std.minimum", math.exp(low), bounds)
        t.put("algorithm.model.std.maximum", math.exp(high), bounds)
        to = f"algorithm.model.std.minimum={math.exp(low):.4g}, maximum={math.exp(high):.4g}"
        t.judge(bounds, "differs", to, "approached, with a gradient everywhere; rl_games cuts off")
    if t.has(most) and t.number(most) > 0:
        t.to(most, "algorithm.model.std.maximum", t.number(most), "approached along another curve")
    return "algorithm.model.std.maximum" in t.settings


def _central_value(t: Translation, horizon: int, rows: int | None, continuous: bool) -> None:
    to = "algorithm.central_value"
    translate_network(t, Place(f"{CENTRAL}.network", CRITIC))
    t.to(f"{CENTRAL}.mini_epochs", f"{to}.epochs", t.integer(f"{CENTRAL}.mini_epochs"))
    _minibatches(t, CENTRAL, f"{to}.num_minibatches", horizon, rows)
    _optimizer(t, CENTRAL, f"{to}.optimizer", continuous, adaptive=False)
    t.judge(f"{CENTRAL}.lr_schedule", "dead", why="the rate of a central value never follows the KL")
    clipped = t.flag(f"{CENTRAL}.clip_value")
    t.to(f"{CENTRAL}.clip_value", f"{to}.value_loss", "clipped" if clipped else "mse")
    t.to(f"{CENTRAL}.e_clip", f"{to}.value_clip", t.number(f"{CENTRAL}.e_clip", 0.2))
    t.put(f"{to}.value_coef", 2.0)  # the parent's loss has neither a half nor a coefficient
    on = t.flag(f"{CENTRAL}.normalize_input")
    t.to(f"{CENTRAL}.normalize_input", f"{CRITIC}.normalize_obs", on)
    if on:
        normalizer_form(t, f"{CRITIC}.normalizer")
    t.dead(
        "no code reads it here",
        *(f"{CENTRAL}.{name}" for name in ("use_smooth_clamp", "kl_threshold", "schedule_type")),
    )
    experimental = f"{CONFIG}.use_experimental_cv"
    if t.flag(experimental, continuous) and t.flag("params.network.separate", False):
        why = "the actor's own critic network is left out: beside the central value it only shares the gradient norm"
        t.always(why) if not t.has(experimental) else t.judge(experimental, "differs", "", why)
    elif t.flag(experimental, continuous):
        ours = "only the central value is trained; rl_games trains the actor's own value head besides"
        t.choose(ours, f"{to}.actor_value", True, experimental if t.has(experimental) else "")
    t.judge(experimental, "mapped", f"{to}.actor_value=False")
