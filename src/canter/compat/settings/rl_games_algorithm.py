"""rl_games' `config` section: the algorithm."""

from __future__ import annotations

import math

from canter.compat.settings.rl_games_network import OTHER_START, STARTS, translate_network
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
    t.move(f"{CONFIG}.gamma", "algorithm.gamma", t.number)
    t.move(f"{CONFIG}.tau", "algorithm.gae_lambda", t.number)
    horizon = t.count(f"{CONFIG}.horizon_length")
    t.to(f"{CONFIG}.horizon_length", "algorithm.horizon", horizon)
    t.move(f"{CONFIG}.mini_epochs", "algorithm.epochs", t.integer)
    _minibatches(t, CONFIG, "algorithm.num_minibatches", horizon, rows)
    _loss(t, continuous)
    _optimizer(t, CONFIG, OPTIMIZER, continuous, adaptive=True)
    _sequences(t, recurrent)
    _advantages(t)
    _normalizers(t)
    if t.section(CENTRAL):
        _central_value(t, horizon, rows, continuous)
    if continuous:
        _standard_deviation(t)
    t.choose("samples are shuffled anew for each epoch; rl_games never shuffles", "algorithm.shuffle", "none")
    t.each(CONFIG, _DEAD, "dead", why="no code reads it")


_DEAD = "rnd_config central_value_config1 ignore_dead_batches bptt_length network_path log_path is_train features"


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
    surrogate = "smooth_clipped" if t.flag(f"{CONFIG}.use_smooth_clamp", False) else "clipped"
    if not t.flag(f"{CONFIG}.ppo", True):
        surrogate = "vanilla"
    t.judge(f"{CONFIG}.ppo", "mapped", f"algorithm.surrogate={surrogate}")
    t.to(f"{CONFIG}.use_smooth_clamp", "algorithm.surrogate", surrogate)
    t.put("algorithm.value_clip", clip)
    _value_loss(t, CONFIG, "algorithm")
    t.move(f"{CONFIG}.critic_coef", "algorithm.value_coef", t.number)
    entropy = t.number(f"{CONFIG}.entropy_coef")
    if t.flag(f"{CONFIG}.schedule_entropy", False) and t.raw(f"{CONFIG}.lr_schedule") == "linear":
        line = {"kind": "linear", "start": entropy, "end": 1e-4}
        t.to(f"{CONFIG}.schedule_entropy", "algorithm.entropy_coef", line)
        t.judge(f"{CONFIG}.entropy_coef", "mapped", "algorithm.entropy_coef.start")
    else:
        t.to(f"{CONFIG}.entropy_coef", "algorithm.entropy_coef", entropy)
        t.dead("it needs lr_schedule: linear", f"{CONFIG}.schedule_entropy")
    _bounds_loss(t, continuous)


def _value_loss(t: Translation, at: str, to: str) -> None:
    t.to(f"{at}.clip_value", f"{to}.value_loss", "clipped" if t.flag(f"{at}.clip_value") else "mse")


def _bounds_loss(t: Translation, continuous: bool) -> None:
    coef, form = f"{CONFIG}.bounds_loss_coef", f"{CONFIG}.bound_loss_type"
    if not continuous:
        t.dead("only continuous actions have bounds", coef, form)
        return
    ours = {"bound": "soft", "regularisation": "regularisation"}.get(str(t.raw(form, "bound")))
    if ours is None:
        t.judge(form, "differs", why="rl_games knows bound and regularisation and reads every other word as no loss")
    elif t.has(coef) and t.number(coef) > 0:
        t.move(coef, "algorithm.bound_loss.coef", t.number)
        t.to(form, "algorithm.bound_loss.form", ours)
    t.each(CONFIG, "bounds_loss_coef bound_loss_type", "mapped", "algorithm.bound_loss=null")


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
    t.each(at, "kl_threshold schedule_type min_lr max_lr lr_multiplier", "dead", why="only an adaptive rate reads it")
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


def _adaptive_rate(t: Translation, at: str, to: str, rate: float, continuous: bool) -> None:
    kind, setting = t.raw(f"{at}.schedule_type", "legacy"), f"{to}.learning_rate"
    if kind == "standard_epoch":
        t.put(setting, rate, f"{at}.learning_rate")
        why = "with schedule_type: standard_epoch the rate never moves in rl_games"
        t.judge(f"{at}.lr_schedule", "differs", why=why)
        t.dead("rl_games has no standard_epoch; the rate stays as it is", f"{at}.schedule_type")
        return
    t.put(f"{setting}.kind", "adaptive_kl")
    t.put(f"{setting}.start", rate, f"{at}.learning_rate")
    t.move(f"{at}.kl_threshold", f"{setting}.target_kl", t.number)
    t.move(f"{at}.min_lr", f"{setting}.minimum", t.number, MIN_LR)
    t.move(f"{at}.max_lr", f"{setting}.maximum", t.number, MAX_LR)
    t.move(f"{at}.lr_multiplier", f"{setting}.factor", t.number, 1.5)
    if kind == "standard" or not continuous:
        t.to(f"{at}.schedule_type", f"{setting}.every", "epoch")
    else:
        t.put(f"{setting}.every", "minibatch")
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
    silent = "" if t.has(length) else ": so this policy trained with 4. Did you mean seq_length?"
    t.dead(f"rl_games ignores this key and uses seq_length, 4 where it is missing{silent}", old)
    resets = t.flag(f"{CONFIG}.zero_rnn_on_done", True)
    for network in (POLICY, CRITIC):
        if f"{network}.memory.cell" in t.settings:
            t.put(f"{network}.memory.reset_on_end", resets)
    t.judge(f"{CONFIG}.zero_rnn_on_done", "mapped", f"{POLICY}.memory.reset_on_end={resets}")


def _advantages(t: Translation) -> None:
    on = t.flag(f"{CONFIG}.normalize_advantage", True)
    t.to(f"{CONFIG}.normalize_advantage", "algorithm.advantage_normalization", "rollout" if on else "none")
    if on:
        ours = "advantages are divided by the root of the mean square, not by n - 1"
        t.choose(ours, "algorithm.advantage_std", "sample")
    rms = f"{CONFIG}.normalize_rms_advantage"
    t.only(rms, t.raw(rms) is not True, "", "advantages are standardised over the rollout: set it to False")
    t.dead("normalize_rms_advantage is off", f"{CONFIG}.adv_rms_momentum")
    bootstrap = f"{CONFIG}.value_bootstrap"
    if not t.flag(bootstrap, True):
        t.to(bootstrap, "algorithm.bootstrap_truncated", False)
    elif t.parity:
        t.judge(bootstrap, "mapped", "the adapter's final_obs: unknown, as the Runner's is")
    else:
        why = "the value of the true last observation where the environment shows it, of the one before where not"
        t.judge(bootstrap, "differs", "algorithm.bootstrap_truncated=True", why)
    _rewards(t, f"{CONFIG}.reward_shaper")


def _rewards(t: Translation, shaper: str) -> None:
    ours = {"shift_value": "shift", "scale_value": "scale", "min_val": "minimum", "max_val": "maximum"}
    for key, setting in ours.items():
        t.move_given(f"{shaper}.{key}", f"algorithm.reward.{setting}", t.number)
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
            t.put("algorithm.model.value_normalizer.of", "values_and_returns")
            normalizer_form(t, "algorithm.model.value_normalizer")
    t.judge(f"{CONFIG}.normalize_value", "mapped", f"algorithm.model.normalize_value={values}")
    frozen = f"{CONFIG}.freeze_critic"
    t.only(frozen, t.raw(frozen) is not True, "", "nothing is frozen here: leave it out")


def normalizer_form(t: Translation, setting: str) -> None:
    """rl_games' running mean and deviation: 1e-5 on the variance, cut off at 5, begun with one row of 0 +- 1."""
    if t.parity:
        for name, value in (("eps", 1e-5), ("eps_on", "variance"), ("clip", 5.0), ("prior_count", 1.0)):
            t.put(f"{setting}.{name}", value)


def _standard_deviation(t: Translation) -> None:
    space = "params.network.space.continuous"
    for key in (f"{space}.mu_activation", f"{space}.sigma_activation"):
        t.only(key, t.raw(key) in NONE, "", "the mean and the deviation have no activation here: set it to None")
    start = f"{space}.sigma_init"
    key = f"{start}.val" if t.raw(f"{start}.val") is not None else f"{start}.value"
    form, floor = _form(t, space)
    raw = t.number(key, 0.0) if t.raw(key) is not None else 0.0
    initial = floor + (math.exp(raw) if form == "log" else math.log1p(math.exp(raw - floor * (form == "linear"))))
    t.put("algorithm.model.std.initial", initial, key)
    to = f"algorithm.model.std.initial={initial:.4g}"
    t.judge(key, "mapped", to)
    constant = t.raw(f"{start}.name", "const_initializer") in ("const_initializer", "default")
    why = "" if constant else f"begins at a constant; {OTHER_START}"
    t.each(start, STARTS, "mapped" if constant else "differs", to, why)
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
    t.move_given(f"{space}.learn_sigma", "algorithm.model.std.learn", t.flag)
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
    translate_network(t, f"{CENTRAL}.network", CRITIC)
    t.move(f"{CENTRAL}.mini_epochs", f"{to}.epochs", t.integer)
    _minibatches(t, CENTRAL, f"{to}.num_minibatches", horizon, rows)
    _optimizer(t, CENTRAL, f"{to}.optimizer", continuous, adaptive=False)
    t.dead("the rate of a central value never follows the KL", f"{CENTRAL}.lr_schedule")
    _value_loss(t, CENTRAL, to)
    t.move(f"{CENTRAL}.e_clip", f"{to}.value_clip", t.number, 0.2)
    t.put(f"{to}.value_coef", 2.0)  # the parent's loss has neither a half nor a coefficient
    t.move(f"{CENTRAL}.normalize_input", f"{CRITIC}.normalize_obs", t.flag)
    if t.settings[f"{CRITIC}.normalize_obs"]:
        normalizer_form(t, f"{CRITIC}.normalizer")
    t.dead("no code reads it here", f"{CENTRAL}.use_smooth_clamp")
    experimental = f"{CONFIG}.use_experimental_cv"
    on = t.flag(experimental, continuous)
    if on and t.flag("params.network.separate", False):
        why = "the actor's own critic network is left out: beside the central value it only shares the gradient norm"
        t.judge(experimental, "differs", why=why) if t.has(experimental) else t.always(why)
    elif on:
        ours = "only the central value is trained; rl_games trains the actor's own value head besides"
        t.choose(ours, f"{to}.actor_value", True, experimental if t.has(experimental) else "")
    t.judge(experimental, "mapped", f"{to}.actor_value=False")
