"""rl_games' settings become Canter's, and no key is lost on the way."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from theirs import REMOVED, RL_GAMES, changed, crashes, rl_games, silent

from canter.app.cli import main
from canter.app.tuning.exploit import PbtConfig, imported_pbt
from canter.app.tuning.pbt import Population
from canter.compat import ImportRefused, import_config
from canter.core.plain import ConfigError
from canter.core.registry import UserError
from canter.core.specs import Continuous, Discrete, EnvSpec, TensorSpec
from canter.training.trainer import Trainer


def leaves(tree, key=""):
    if isinstance(tree, Mapping) and tree:
        return {leaf for name, value in tree.items() for leaf in leaves(value, f"{key}.{name}" if key else name)}
    return {key}


def entry(imported, key):
    return next(entry for entry in imported.report.entries if entry.key == f"params.{key}")


def test_numbers_arrive_where_they_belong():
    config = import_config(RL_GAMES).config
    ppo = config.algorithm
    assert (ppo.gamma, ppo.gae_lambda, ppo.horizon, ppo.epochs) == (0.98, 0.9, 16, 3)
    assert ppo.num_minibatches == 16 * 8 // 32
    assert (ppo.clip_ratio, ppo.value_clip, ppo.value_loss, ppo.value_coef) == (0.3, 0.3, "clipped", 4)
    assert (ppo.bound_loss.form, ppo.bound_loss.coef, ppo.bound_loss.limit) == ("soft", 0.001, 1.1)
    assert ppo.optimizer.learning_rate.start == 5e-4, "a number written as a word"
    assert (ppo.optimizer.max_grad_norm, ppo.optimizer.eps) == (0.7, 1e-8)
    assert ppo.reward.scale == 0.1
    assert (ppo.model.shared_trunk, ppo.model.policy.hidden, ppo.model.std.initial) == (True, (32, 16), 1.0)
    assert (config.env.id, config.env.num_envs, config.seed, config.until.iterations) == ("Pendulum-v1", 8, 7, 2)


@pytest.mark.parametrize("parity", [False, True])
def test_every_key_has_one_verdict(parity):
    entries = import_config(RL_GAMES, parity=parity).report.entries
    keys = [entry.key for entry in entries if entry.key]
    assert sorted(keys) == sorted(leaves(RL_GAMES))
    assert {entry.status for entry in entries if not entry.key} <= {"changed"}, "what no key controls is a difference"


@pytest.mark.parametrize(
    "key",
    [
        "config.device",
        "config.reward_shaper.min_val",
        "network.space.continuous.learn_sigma",
        "network.cnn",
        "network.rnn",
    ],
)
@pytest.mark.parametrize("empty", [None, "None", {}])
def test_a_known_key_may_be_empty_and_an_unknown_one_may_not(key, empty):
    report = import_config(changed(RL_GAMES, {f"params.{key}": empty})).report
    (entry,) = [entry for entry in report.entries if entry.key == f"params.{key}"]
    assert entry.status == "mapped" and entry.to == "nothing, as it is empty"
    if empty != {}:
        with pytest.raises(ImportRefused, match=rf"params\.{key}_: unknown|params\.{key}_=None|params\.{key}_='None'"):
            import_config(changed(RL_GAMES, {f"params.{key}_": empty}))


def test_the_imported_run_trains():
    with Trainer(import_config(RL_GAMES).config) as trainer:
        trainer.learn()
        assert trainer.progress.ended_by == "until.iterations"


@pytest.mark.parametrize(
    ("changes", "key", "status", "words"),
    [
        ({"config__seq_len": 8}, "config.seq_len", "no_effect", "not recurrent"),
        ({"load_checkpoint": True}, "load_checkpoint", "no_effect", "checkpoint"),
        ({"network__rnn1": {"units": 3}}, "network.rnn1.units", "no_effect", "no code"),
        ({"config__lr_schedule": "cosine"}, "config.lr_schedule", "no_effect", "constant"),
        ({"config__bound_loss_type": "regularization"}, "config.bound_loss_type", "changed", "regularisation"),
        ({"config__schedule_type": "standard_epoch"}, "config.schedule_type", "no_effect", "stays"),
        ({"config__score_to_win": 100}, "config.score_to_win", "changed", "last 100 episodes"),
        ({"seed": 0}, "seed", "changed", "seeds nothing"),
    ],
)
def test_verdicts_that_users_of_rl_games_should_know(changes, key, status, words):
    found = entry(import_config(rl_games(**changes)), key)
    assert found.status == status and words in found.why


def test_a_recurrent_policy_trains_with_the_length_that_rl_games_really_used():
    rnn = {"name": "lstm", "units": 8, "layers": 1, "before_mlp": True, "concat_input": True}
    imported = import_config(rl_games(network__rnn=rnn, config__seq_len=8))
    memory = imported.config.algorithm.model.policy.rnn
    assert imported.config.algorithm.sequence_length == 4
    assert "Did you mean seq_length" in entry(imported, "config.seq_len").why
    assert (memory.cell, memory.position, memory.concat_input) == ("lstm", "before_mlp", False)
    assert import_config(
        rl_games(network__rnn={**rnn, "before_mlp": False})
    ).config.algorithm.model.policy.rnn.concat_input


def test_parameterisations_of_the_std_keep_rl_games_initial_value():
    at = "network__space__continuous__"
    changes = {f"{at}min_sigma": 0.15, f"{at}sigma_parametrization": "softplus", f"{at}learn_sigma": False}
    theirs = import_config(rl_games(**changes), parity=True).config.algorithm.model.std
    ours = import_config(rl_games(**changes)).config.algorithm.model.std
    start = 0.15 + math.log(2)  # softplus(0) and the floor
    assert (theirs.form, theirs.floor, theirs.learn, theirs.initial) == ("softplus", 0.15, False, pytest.approx(start))
    assert (ours.form, ours.floor, ours.minimum, ours.initial) == ("bounded", 0.0, 0.15, pytest.approx(start))


def test_a_linear_std_has_rl_games_floor_and_canters_bounds():
    at = "network__space__continuous__"
    linear = {f"{at}sigma_parametrization": "linear", f"{at}sigma_init": {"name": "const_initializer", "val": 0.5}}
    std = import_config(rl_games(**linear), parity=True).config.algorithm.model.std
    start = 1e-3 + math.log1p(math.exp(0.5 - 1e-3))
    assert (std.form, std.floor, std.initial) == ("linear", 1e-3, pytest.approx(start))
    for parity in (True, False):
        imported = import_config(rl_games(**{f"{at}logstd_bounds": [-2, 1], f"{at}max_sigma": 1.5}), parity=parity)
        std = imported.config.algorithm.model.std
        assert (std.form, std.minimum, std.maximum) == ("bounded", pytest.approx(math.exp(-2)), 1.5)
        assert "cuts off" in entry(imported, "network.space.continuous.logstd_bounds").why
    with pytest.raises(ConfigError, match=r"logstd_bounds: expected two numbers.*\[1, -2\]"):
        import_config(rl_games(**{f"{at}logstd_bounds": [1, -2]}))


def test_only_the_first_layer_may_be_normalised():
    changes = {"network__mlp__normalization": "layer_norm", "network__mlp__norm_only_first_layer": True}
    policy = import_config(rl_games(**changes)).config.algorithm.model.policy
    assert (policy.layer_norm, policy.layer_norm_layers) == (True, "first")


def test_central_value_becomes_the_critic_with_its_own_loss():
    central = {
        "minibatch_size": 64,
        "mini_epochs": 5,
        "learning_rate": 1e-4,
        "lr_schedule": "adaptive",
        "clip_value": False,
        "normalize_input": True,
        "network": {
            "name": "actor_critic",
            "central_value": True,
            "mlp": {"units": [48], "activation": "relu", "initializer": {"name": "default"}},
        },
    }
    imported = import_config(rl_games(config__central_value_config=central))
    ppo = imported.config.algorithm
    assert (ppo.central_value.epochs, ppo.central_value.num_minibatches) == (5, 2)
    own = ppo.central_value
    assert (own.value_coef, own.value_loss, own.value_clip) == (2.0, "mse", 0.2), "no half and no coefficient there"
    assert (ppo.value_coef, ppo.value_loss, ppo.value_clip) == (4, "clipped", 0.3), "the actor's own value head's"
    assert ppo.central_value.optimizer.max_grad_norm == math.inf
    assert (ppo.model.critic.hidden, ppo.model.critic.activation, ppo.model.shared_trunk) == ((48,), "relu", False)
    assert entry(imported, "config.central_value_config.lr_schedule").status == "no_effect"
    spec = EnvSpec({"policy": TensorSpec((3,))}, Continuous((-1.0,), (1.0,)), 8, torch.device("cpu"))
    ppo.build(spec, 0)


@pytest.mark.parametrize(
    ("changes", "release", "name"),
    [
        ({}, None, "1.6.5"),
        ({"config__env_name": "rlgpu"}, None, "1.6.1"),
        ({"config__env_name": "rlgpu"}, "rl_games-1.6.5", "1.6.5"),
        ({"network__space__continuous__min_sigma": 0.1}, None, "2.0"),
        ({"config__schedule_type": "per_minibatch"}, None, "2.0"),
        ({}, "rl_games-2.0", "2.0"),
    ],
)
def test_the_release_comes_from_the_caller_or_shows_in_the_file_and_is_named(changes, release, name):
    imported = import_config(rl_games(**changes), parity=True, env="Pendulum-v1", release=release)
    assert imported.report.text().splitlines()[0].startswith(f"settings: rl_games {name} (")
    ppo = imported.config.algorithm
    old = name == "1.6.1"
    assert ppo.bootstrap_truncated is not old
    assert ppo.obs_statistics == ("first_epoch" if old else "minibatch")
    for normalizer in (ppo.model.policy.normalizer, ppo.model.value_normalizer):
        assert normalizer.variance == ("sample" if old else "population")


def test_an_installed_rl_games_is_the_release(monkeypatch):
    for installed, name in (("1.6.1", "1.6.1"), ("1.6.5", "1.6.5"), ("2.0.0", "2.0")):
        monkeypatch.setattr("canter.compat.settings.rl_games.installed_version", lambda version=installed: version)
        report = import_config(rl_games(config__env_name="rlgpu"), env="Pendulum-v1").report
        assert report.dialect == f"rl_games {name} (as rl_games {installed} is installed; --source names another)"


def test_time_outs_count_as_ends_before_1_6_5_unless_the_file_says_otherwise():
    imported = import_config(rl_games(), release="rl_games-1.6.1")
    assert not imported.config.algorithm.bootstrap_truncated
    assert any("value_bootstrap is off by default in rl_games 1.6.1" in e.why for e in imported.report.of("mapped"))
    own = import_config(rl_games(config__value_bootstrap=True), release="rl_games-1.6.1")
    assert own.config.algorithm.bootstrap_truncated


def test_keys_of_a_later_release_have_no_effect():
    at = "network__space__continuous__"
    settings = rl_games(config__max_lr=1e-3, **{f"{at}sigma_parametrization": "softplus", f"{at}min_sigma": 0.15})
    new, old = (import_config(settings, parity=True, release=f"rl_games-{name}") for name in ("2.0", "1.6.5"))
    assert (new.config.algorithm.model.std.form, old.config.algorithm.model.std.form) == ("softplus", "log")
    assert new.config.algorithm.optimizer.learning_rate.maximum == 1e-3
    assert old.config.algorithm.optimizer.learning_rate.maximum == 1e-2
    assert entry(old, "config.max_lr").status == "no_effect" and "2.0 does" in entry(old, "config.max_lr").why


def test_a_linear_rate_follows_frames_since_2_0():
    settings = rl_games(config__lr_schedule="linear", config__max_epochs=-1, config__max_frames=10_000)
    rates = [
        import_config(settings, release=f"rl_games-{name}").config.algorithm.optimizer.learning_rate
        for name in ("1.6.5", "2.0")
    ]
    assert [type(rate).__name__ for rate in rates] == ["Constant", "Linear"]


def test_a_release_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"source='rl_games-1.6': expected one of rl_games-1.6.1, .*1.6.5.*2.0"):
        import_config(rl_games(), release="rl_games-1.6")


def test_discrete_actions_react_by_the_epoch_and_know_no_bounds_loss():
    ppo = import_config(
        rl_games(algo__name="a2c_discrete", model__name="discrete_a2c", network__space={"discrete": None})
    )
    rate = ppo.config.algorithm.optimizer.learning_rate
    assert rate.every == "epoch" and ppo.config.algorithm.bound_loss is None
    assert entry(ppo, "config.bounds_loss_coef").status == "no_effect"
    spec = EnvSpec({"policy": TensorSpec((3,))}, Discrete(4), 8, torch.device("cpu"))
    ppo.config.algorithm.build(spec, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config__gama": 0.9}, ("params.config.gama=0.9", "did you mean gamma", "--without params.config.gama")),
        ({"algo__name": "dqn"}, ("params.algo.name='dqn'", "canter.register('algorithm', NAME)")),
        ({"model__name": "mine"}, ("params.model.name='mine'", "known: continuous_a2c_logstd")),
        ({"network__name": "mine"}, ("params.network.name='mine'", "canter.register('network', 'mine')")),
        ({"config__num_actors": -1}, ("params.config.num_actors=-1", "--num-envs N")),
        ({"config__self_play_config": {"update_score": 1}}, ("self_play_config.update_score", "self_play")),
    ],
)
def test_unsupported_values_are_refused_by_key_and_remedy(changes, words):
    with pytest.raises(ImportRefused) as refused:
        import_config(rl_games(**changes))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config__gamma": "high"}, ("params.config.gamma", "a number", "'high'")),
        ({"config__gamma": "None"}, ("params.config.gamma", "a number", "'None'")),
        ({"config__gamma": REMOVED}, ("params.config.gamma", "required")),
        ({"config__gamma": 1.5}, ("params.config.gamma=1.5", "algorithm.gamma", "0..1")),
        ({"config__mini_epochs": 2.5}, ("params.config.mini_epochs", "whole number")),
        ({"config__clip_value": "maybe"}, ("params.config.clip_value", "true or false")),
        ({"config__horizon_length": "${....horizon}"}, ("params.config.horizon_length", "--set horizon=VALUE")),
        ({"config__minibatch_size": 48}, ("params.config.minibatch_size", "16 * 8 = 128", "use 64", "48")),
        ({"network__mlp__activation": "relo"}, ("params.network.mlp.activation", "did you mean relu")),
        ({"network__mlp__units": "256"}, ("params.network.mlp.units", "list of whole numbers")),
        ({"network__mlp": 3}, ("params.network.mlp", "a mapping", "3")),
        ({"config": [1, 2]}, ("params.config", "a mapping", "[1, 2]")),
        ({"algo": None}, ("params.algo", "a mapping", "required")),
        ({"config__horizon_length": -4}, ("params.config.horizon_length", "above 0", "-4")),
        ({"config__num_actors": 0}, ("params.config.num_actors", "above 0", "0")),
    ],
)
def test_broken_values_name_key_value_and_remedy(changes, words):
    with pytest.raises(ConfigError) as broken:
        import_config(rl_games(**changes))
    for word in words:
        assert word in str(broken.value)


def test_a_refused_key_may_be_left_out_by_the_caller():
    imported = import_config(rl_games(config__gama=0.9), without=("params.config.gama",))
    assert entry(imported, "config.gama").status == "changed"
    assert "left out by --without" in entry(imported, "config.gama").why


def test_a_key_to_leave_out_must_be_in_the_file():
    with pytest.raises(ConfigError, match=r"--without params.config.gama: .* no such key, did you mean .*config.gamma"):
        import_config(rl_games(), without=("params.config.gama",))


def test_errors_name_the_file_and_the_line(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text("params:\n  algo: {name: a2c_discrete}\n  model: {name: discrete_a2c}\n  config:\n    gamma: x\n")
    with pytest.raises(ConfigError, match=r"theirs\.yaml:5: params\.config\.gamma"):
        import_config(rl_games_file(file))


def rl_games_file(path):
    """The file with all keys that come before gamma is looked at."""
    path.write_text(
        path.read_text() + "    env_name: CartPole-v1\n    num_actors: 8\n"
        "  network: {name: actor_critic, mlp: {units: [8], activation: elu}}\n"
    )
    return path


def test_what_isaac_labs_wrapper_does_is_done_by_the_environment_or_left_to_it():
    wrapper = {"clip_actions": 1.0, "clip_observations": 5.0, "obs_groups": {"obs": ["policy", "feet"]}}
    own = import_config(rl_games(env=wrapper), env="isaaclab:Any", num_envs=8)
    assert own.config.env.options == {"clip_actions": 1.0, "clip_observations": 5.0}
    assert own.config.algorithm.model.policy.obs_groups == ("policy", "feet")
    given = import_config(rl_games(env=wrapper))  # a script with Runner has the wrapper itself
    assert given.config.env.options == {} and given.config.algorithm.model.policy.obs_groups is None


SECTIONS = {
    "network.cnn": {"type": "conv2d", "convs": [], "initializer": {"name": "default"}},
    "network.rnn": {"name": "lstm", "units": 8},
    "config.player": {"games_num": 3},
    "config.seq_length": 4,
    "config.central_value_config": {
        "mini_epochs": 2,
        "minibatch_size": 32,
        "learning_rate": "5e-4",
        "clip_value": True,
        "normalize_input": True,
        "network": {"mlp": {"units": [8], "activation": "elu", "initializer": {"name": "default"}}},
    },
    "env": {"clip_actions": 1.0, "obs_groups": {"obs": ["policy"]}},
}


def test_a_misspelt_key_is_refused_in_every_section_that_rl_games_reads():
    assert not silent(rl_games(**SECTIONS), but=("regularizer",))


def test_no_value_of_a_wrong_type_ends_in_another_error():
    assert not crashes(rl_games(**SECTIONS, **{"config.env_config": {"a": 1}, "config.bound_loss_type": "bound"}))


def test_files_of_sac_and_amp_keep_that_too():
    assert not silent(sac(), but=("regularizer", "space", "continuous", "mu_init", "sigma_init", "env_config"))
    assert not silent(rl_games(**AMP), but=("regularizer",)) and not crashes(sac()) and not crashes(rl_games(**AMP))


def test_images_are_not_normalised_and_the_report_says_so():
    cnn = {"type": "conv2d", "activation": "relu", "initializer": {"name": "default"}}
    cnn["convs"] = [{"filters": 4, "kernel_size": 3, "strides": 1, "padding": 0}]
    for kind, status in (("conv2d", "changed"), ("conv1d", "mapped")):
        found = entry(import_config(rl_games(network__cnn=cnn | {"type": kind}), parity=True), "config.normalize_input")
        assert found.status == status and ("each pixel" in found.why) == (kind == "conv2d")


def test_a_log_reward_gets_the_minimum_that_it_needs():
    imported = import_config(rl_games(config__reward_shaper={"log_val": True}))
    assert imported.config.algorithm.reward.squash == "log"
    assert "1e-8" in entry(imported, "config.reward_shaper.log_val").why


SAC = {
    "params": {
        "seed": 3,
        "algo": {"name": "sac"},
        "model": {"name": "soft_actor_critic"},
        "network": {
            "name": "soft_actor_critic",
            "separate": True,
            "space": {"continuous": None},
            "mlp": {"units": [32, 16], "activation": "relu", "initializer": {"name": "default"}},
            "log_std_bounds": [-5, 2],
        },
        "config": {
            "name": "pendulum",
            "env_name": "gymnasium",
            "normalize_input": True,
            "reward_shaper": {"scale_value": 1.0},
            "max_epochs": 12,
            "num_steps_per_episode": 4,
            "gamma": 0.98,
            "init_alpha": 0.5,
            "alpha_lr": "1e-3",
            "actor_lr": 2e-4,
            "critic_lr": 3e-4,
            "critic_tau": 0.01,
            "batch_size": 32,
            "learnable_temperature": True,
            "utd_ratio": 0.5,
            "policy_frequency": 3,
            "num_warmup_steps": 8,
            "replay_buffer_size": 2000,
            "num_actors": 4,
            "env_config": {"env_name": "Pendulum-v1"},
        },
    }
}


def sac(**changes):
    config = SAC["params"]["config"]
    removed = {key for key, value in changes.items() if value is REMOVED}
    return {"params": SAC["params"] | {"config": {k: v for k, v in (config | changes).items() if k not in removed}}}


def test_sac_arrives_and_every_key_has_one_verdict():
    imported = import_config(SAC)
    found = imported.config.algorithm
    assert sorted(e.key for e in imported.report.entries if e.key) == sorted(leaves(SAC))
    assert (found.horizon, found.updates_per_step, found.policy_delay, found.batch_size) == (4, 2.0, 3, 32)
    assert found.warmup_steps == 8 * 4 * 4, "epochs of 4 steps in 4 environments"
    assert (found.gamma, found.tau, found.replay.capacity, found.replay.save) == (0.98, 0.01, 2000, False)
    assert (found.temperature.initial, found.temperature.learned) == (0.5, True)
    optimizers = (found.optimizer, found.critic_optimizer, found.temperature.optimizer)
    assert [optimizer.learning_rate.initial for optimizer in optimizers] == [2e-4, 3e-4, 1e-3]
    assert [optimizer.max_grad_norm for optimizer in optimizers] == [math.inf, 5.0, math.inf]
    assert (found.policy.hidden, found.critic.hidden, found.critic.normalize_obs) == ((32, 16), (32, 16), True)
    assert (math.log(found.std.minimum), math.log(found.std.maximum)) == pytest.approx((-5, 2))


def test_an_imported_sac_trains():
    with Trainer(import_config(SAC).config) as trainer:
        trainer.learn()
        assert trainer.progress.ended_by == "until.iterations"
        algorithm: Any = trainer.algorithm
        assert algorithm.updates == (12 - 7) * 4 * 2, "the eighth iteration ends the warm-up"


def test_a_key_missing_in_a_sac_file_is_rl_games_default():
    imported = import_config(sac(num_actors=REMOVED, utd_ratio=REMOVED, policy_frequency=REMOVED))
    found = imported.config.algorithm
    assert (imported.config.env.num_envs, found.updates_per_step, found.policy_delay) == (1, 1.0, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward_shaper": {"scale_value": 0.1}}, ("reward_shaper.scale_value=0.1", "algorithm.scale_rewards")),
        ({"target_entropy_coef": 0.5}, ("target_entropy_coef=0.5", "--algorithm.temperature.target-entropy")),
        ({"critic_taw": 0.5}, ("critic_taw=0.5", "did you mean critic_tau")),
    ],
)
def test_values_that_sac_does_not_support_are_refused(changes, words):
    with pytest.raises(ImportRefused) as refused:
        import_config(sac(**changes))
    for word in words:
        assert word in str(refused.value)


AMP = {
    "algo__name": "amp_continuous",
    "model__name": "continuous_amp",
    "network__name": "amp",
    "network__separate": True,
    "network__space__continuous__learn_sigma": False,
    "network__disc": {"units": [64, 32], "activation": "relu", "initializer": {"name": "default"}},
    "config__critic_coef": 5,
    "config__amp_obs_demo_buffer_size": 200_000,
    "config__amp_replay_buffer_size": 1_000,
    "config__amp_replay_keep_prob": 0.25,
    "config__amp_batch_size": 512,
    "config__amp_minibatch_size": 128,
    "config__disc_coef": 5,
    "config__disc_logit_reg": 0.06,
    "config__disc_grad_penalty": 0.2,
    "config__disc_reward_scale": 3,
    "config__disc_weight_decay": 0.001,
    "config__normalize_amp_input": True,
    "config__task_reward_w": 0.25,
    "config__disc_reward_w": 0.75,
}


def test_amp_becomes_the_extension_of_that_name_and_asks_for_clips():
    given = rl_games(**AMP)
    imported = import_config(given)
    ppo = imported.config.algorithm
    (amp,) = ppo.extensions
    assert (amp.hidden, amp.activation, amp.normalize_obs) == ((64, 32), "relu", True)
    assert (amp.logit_regularization, amp.gradient_penalty, amp.weight_regularization) == (0.06, 0.2, 0.001)
    assert (amp.reward_scale, amp.task_weight, amp.style_weight) == (3, 0.25, 0.75)
    assert (amp.replay, amp.replay_rows, amp.batch_size) == (1000, round(0.25 * 16 * 8), 128)
    assert amp.updates == ppo.epochs * ppo.num_minibatches and amp.optimizer.learning_rate.initial == 5e-4
    assert (ppo.value_coef, ppo.bound_loss.limit) == (10, 1.0)
    entries = imported.report.entries
    assert sorted(entry.key for entry in entries if entry.key) == sorted(leaves(given))
    assert any("name their files here" in entry.line() for entry in entries)
    with pytest.raises(ValueError, match="motions names no clips"):
        Trainer(imported.config)
    named = {"motions": ["walk.csv"], "time_step": 0.02, "columns": ["dof_positions/hip"]}
    imported = import_config(rl_games(**AMP, config__amp=named))
    (amp,) = imported.config.algorithm.extensions
    assert (amp.motions, amp.time_step, amp.columns) == (("walk.csv",), 0.02, ("dof_positions/hip",))
    assert not any("name their files here" in entry.line() for entry in imported.report.entries)
    with pytest.raises(ImportRefused, match="did you mean motions"):
        import_config(rl_games(**AMP, config__amp={"motion": ["walk.csv"]}))


def test_amp_has_two_names():
    other = {"algo__name": "amp", "model__name": "amp", "config__enable_eps_greedy": False}
    configs = [import_config(rl_games(**AMP | changes)).config for changes in ({}, other)]
    assert configs[0] == configs[1]
    with pytest.raises(ImportRefused, match="enable_eps_greedy=True: some agents act without noise"):
        import_config(rl_games(**AMP, config__enable_eps_greedy=True))


PBT = {
    "enabled": True,
    "policy_idx": 0,
    "num_policies": 6,
    "directory": ".",
    "workspace": "pbt_workspace",
    "objective": "episode.Curriculum/adr",
    "interval_steps": 50_000_000,
    "threshold_std": 0.2,
    "threshold_abs": 0.025,
    "mutation_rate": 0.5,
    "change_range": [1.2, 1.5],
    "mutation": {
        "agent.params.config.learning_rate": "mutate_float",
        "agent.params.config.e_clip": "mutate_float",
        "agent.params.config.gamma": "mutate_discount",
        "env.rewards.success.weight": "mutate_float",
    },
}
"""A section of Isaac Lab; its `dexsuite` file has one."""


def test_a_population_becomes_a_record_with_the_settings_of_each_mutated_key():
    imported = import_config({**rl_games(), "pbt": PBT})
    population = imported.population
    assert population is not None and population.enabled
    assert (population.members, population.objective) == (6, "episode.Curriculum/adr")
    assert (population.interval_steps, population.threshold_std, population.threshold_abs) == (50_000_000, 0.2, 0.025)
    assert (population.mutation_rate, population.change_range) == (0.5, (1.2, 1.5))
    assert population.mutations == {
        "algorithm.optimizer.learning_rate.start": "mutate_float",
        "algorithm.clip_ratio": "mutate_float",
        "algorithm.value_clip": "mutate_float",
        "algorithm.gamma": "mutate_discount",
    }
    assert population.fixed == ("env.rewards.success.weight",)
    changed = [entry.line() for entry in imported.report.of("changed")]
    assert any("canter tune --pbt trains the population of 6" in line for line in changed)
    assert any("env.rewards.success.weight='mutate_float': no setting here" in line for line in changed)


def test_the_command_tunes_the_population_of_a_file(tmp_path, monkeypatch):
    def stop(plan, jobs, command):
        raise UserError("no run is needed")

    monkeypatch.setattr("canter.app.cli.plans.run_or_stop", stop)
    file = tmp_path / "file.yaml"
    file.write_text(yaml.safe_dump({**rl_games(), "pbt": PBT}))
    flags = ["--pbt", "--device", "cpu", "--total-steps", "1000", "--run-dir", str(tmp_path), "--name", "search"]
    with pytest.raises(SystemExit):
        main(["tune", "tensor:cartpole", "--config", str(file), *flags])
    plan = json.loads((tmp_path / "search" / "pbt.json").read_text())
    assert (plan["members"], plan["rule"]) == (6, "threshold")


def test_a_population_selects_the_rule_of_rl_games():
    imported = import_config({**rl_games(), "pbt": PBT})
    assert imported.population is not None
    plan = PbtConfig(**imported_pbt(imported.population, imported.config))
    assert (plan.rule, plan.members, plan.interval, plan.score) == ("threshold", 6, 50_000_000, "env/Curriculum/adr")
    assert (plan.threshold_std, plan.threshold_abs, plan.mutation_rate) == (0.2, 0.025, 0.5)
    assert plan.change_range == (1.2, 1.5) and not plan.spread
    assert plan.space == {
        "algorithm.optimizer.learning_rate.start": "1e-06..0.01:log",
        "algorithm.clip_ratio": "1e-4x..1e4x:log",
        "algorithm.value_clip": "1e-4x..1e4x:log",
        "algorithm.gamma": "1e-3x..1e3x:log1m",
    }
    assert (
        Population.check(plan, replace(imported.config, total_steps=10**9)).space["algorithm.clip_ratio"]
        == "3e-05..3000:log"
    )
    with pytest.raises(UserError, match=r"add --total-steps 256"):  # 2 epochs of 8 x 16 transitions
        Population.check(plan, imported.config)


def test_a_population_that_is_off_is_read_and_without_effect():
    imported = import_config({**rl_games(), "pbt": {**PBT, "enabled": False, "launcher": "python.sh"}})
    assert imported.population is not None and not imported.population.enabled
    found = {entry.key: entry.status for entry in imported.report.entries if entry.key.startswith("pbt.")}
    assert set(found.values()) == {"no_effect"}
    assert import_config(rl_games()).population is None
    defaults = import_config({**rl_games(), "pbt": {"enabled": False}}).population
    assert defaults is not None
    assert (defaults.members, defaults.interval_steps, defaults.mutation_rate) == (8, 100_000, 0.25)
    assert (defaults.threshold_std, defaults.threshold_abs, defaults.change_range) == (0.1, 0.05, (1.1, 2.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_policy": 4}, r"pbt\.num_policy=4: unknown key, did you mean num_policies"),
        ({"num_policies": 0}, r"pbt\.num_policies: expected a whole number above 0, got 0"),
        ({"change_range": [2.0, 1.1]}, r"pbt\.change_range: expected two factors, such as"),
        ({"mutation": {"agent.params.config.gamma": "mutate_flaot"}}, "did you mean mutate_float"),
    ],
)
def test_a_population_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        import_config({**rl_games(), "pbt": {**PBT, **changes}})
