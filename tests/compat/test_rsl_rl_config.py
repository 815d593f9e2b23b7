"""RSL-RL's settings of all generations become Canter's."""

import math
from dataclasses import replace
from typing import Any

import pytest
from test_rl_games_config import leaves
from theirs import GENERATIONS, RSL_RL, changed, crashes, silent

from canter.algorithms.distillation import DistillationConfig
from canter.compat import ImportRefused, import_config
from canter.compat.settings.rsl_rl_network import generation_of
from canter.config import TrainConfig
from canter.core.plain import ConfigError, to_plain
from canter.training.trainer import Trainer


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_generation_is_recognised_with_the_same_networks(generation):
    tree = GENERATIONS[generation]
    found = generation_of(tree)
    assert found is not None and found.number == generation
    imported = import_config(tree, num_envs=4)
    ppo = imported.config.algorithm
    assert (ppo.model.policy.hidden, ppo.model.critic.hidden, ppo.model.std.initial) == ((32, 16), (24,), 0.5)
    assert (ppo.horizon, ppo.epochs, ppo.num_minibatches, ppo.value_coef) == (8, 4, 2, 3.0)
    assert ppo.gradient_clipping == ("per_network" if generation >= 4 else "joint")
    assert ppo.model.policy.normalize_obs is (generation != 1)
    assert sorted(entry.key for entry in imported.report.entries if entry.key) == sorted(leaves(tree))


def test_numbers_arrive_where_they_belong():
    config = import_config(RSL_RL, num_envs=4, env="Pendulum-v1").config
    ppo = config.algorithm
    rate = ppo.optimizer.learning_rate
    assert (rate.start, rate.target_kl, rate.every, rate.minimum, rate.maximum) == (1e-3, 0.02, "minibatch", 1e-5, 1e-2)
    assert (ppo.gamma, ppo.gae_lambda, ppo.clip_ratio, ppo.value_clip, ppo.value_loss) == (
        0.97,
        0.94,
        0.25,
        0.25,
        "clipped",
    )
    assert (ppo.optimizer.max_grad_norm, ppo.optimizer.eps, ppo.model.normalize_value) == (0.8, 1e-8, False)
    assert ppo.model.policy_gain == ppo.model.policy.init_gain == pytest.approx(math.sqrt(2))
    assert (ppo.model.bounds, ppo.model.policy.obs_groups, ppo.model.critic.activation) == ("none", ("policy",), "tanh")
    assert (config.seed, config.until.iterations, config.total_steps, config.env.num_envs) == (3, 2, None, 4)


def test_the_defaults_of_a_generation_are_its_own():
    bare = {"num_steps_per_env": 8, "max_iterations": 1, "algorithm": {"class_name": "PPO"}}
    old = import_config({**bare, "policy": {"class_name": "ActorCritic"}}).config.algorithm
    new = import_config(
        {**bare, "actor": {"class_name": "MLPModel", "distribution_cfg": {}}, "critic": {}}
    ).config.algorithm
    assert (old.gamma, old.epochs, old.num_minibatches, old.entropy_coef.value) == (0.998, 1, 1, 0.0)
    assert (new.gamma, new.epochs, new.num_minibatches, new.entropy_coef.value) == (0.99, 5, 4, 0.01)
    assert old.optimizer.learning_rate.initial == 1e-3 and not hasattr(old.optimizer.learning_rate, "target_kl")


def test_zeros_around_an_image_are_as_many_as_rsl_rls():
    # ceil((kernel - stride) / 2) on each side, by RSL-RL's _compute_padding where the stride divides the side.
    cnn = {"output_channels": [8, 8, 8], "kernel_size": [8, 4, 3], "stride": [4, 1, 2], "padding": "zeros"}
    imported = import_config(changed(RSL_RL, {"actor.cnn_cfg": cnn}), num_envs=4)
    assert imported.config.algorithm.model.policy.cnn.layers == ((8, 8, 4, 2), (8, 4, 1, 2), (8, 3, 2, 1))
    (padding,) = [each for each in imported.report.entries if each.key == "actor.cnn_cfg.padding"]
    assert padding.why.startswith("right for images whose sides the strides divide")


def test_a_difference_of_both_networks_is_reported_once():
    imported = import_config(GENERATIONS[2], num_envs=8)
    always = [each.why for each in imported.report.entries if not each.key]
    assert always and len(always) == len(set(always))


def test_the_imported_run_trains():
    groups = changed(RSL_RL, {"obs_groups": {}})
    config = import_config(groups, num_envs=4, env="Pendulum-v1").config
    with Trainer(config) as trainer:
        trainer.learn()


def test_recurrence_of_both_networks_runs_over_the_whole_rollout():
    rnn = {"class_name": "RNNModel", "rnn_type": "gru", "rnn_hidden_dim": 12, "rnn_num_layers": 2}
    tree = changed(RSL_RL, {f"{net}.{key}": value for net in ("actor", "critic") for key, value in rnn.items()})
    ppo = import_config(tree, num_envs=4).config.algorithm
    assert ppo.sequence_length == ppo.horizon == 8
    assert (ppo.model.policy.rnn.cell, ppo.model.critic.rnn.layers) == ("gru", 2)
    none = changed(RSL_RL, {"actor.rnn_type": None, "actor.rnn_hidden_dim": 256, "actor.rnn_num_layers": 1})
    assert import_config(none, num_envs=4).config.algorithm.model.policy.rnn is None, "as mjlab writes no memory"


@pytest.mark.parametrize("path", ["rsl_rl.models:{}", "rsl_rl.models.{}", "rsl_rl.models.rnn_model:{}"])
def test_classes_of_rsl_rl_are_known_by_their_path_too(path):
    rnn = {"rnn_type": "gru", "rnn_hidden_dim": 12, "rnn_num_layers": 2}
    own = {f"{net}.{key}": value for net in ("actor", "critic") for key, value in rnn.items()}

    def imported(path):
        named = {f"{net}.class_name": path.format("RNNModel") for net in ("actor", "critic")}
        named |= {"actor.distribution_cfg.class_name": path.format("GaussianDistribution")}
        tree = changed(RSL_RL, own | named | {"algorithm.class_name": path.format("PPO")})
        return import_config(tree, parity=True, num_envs=4)

    found = imported(path)
    assert found.config.algorithm == imported("{}").config.algorithm
    assert found.config.algorithm.model.policy.rnn.cell == "gru" and found.config.algorithm.shuffle == "none"
    assert not found.report.of("refused")


def test_an_old_recurrent_class_by_its_path_is_recurrent_and_actor_critic_is_not():
    rnn = {"policy.rnn_type": "lstm", "policy.rnn_hidden_size": 12}
    path = {"policy.class_name": "rsl_rl.modules.ActorCriticRecurrent"}
    found = import_config(changed(GENERATIONS[3], rnn | path), num_envs=4).config.algorithm
    assert (found.model.policy.rnn.cell, found.model.critic.rnn.hidden, found.sequence_length) == ("lstm", 12, 8)
    bare = import_config(changed(GENERATIONS[3], path), num_envs=4).config.algorithm
    assert (bare.model.policy.rnn.cell, bare.model.policy.rnn.hidden) == ("lstm", 256), "RSL-RL's defaults"
    plain = import_config(changed(GENERATIONS[3], rnn | {"policy.class_name": "ActorCritic"}), num_envs=4)
    assert plain.config.algorithm.model.policy.rnn is None, "RSL-RL ignores the layers"
    assert {entry.key for entry in plain.report.of("no_effect")} >= set(rnn)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm.clip_parm": 0.2}, ("algorithm.clip_parm=0.2", "did you mean clip_param")),
        ({"algorithm.class_name": "MyPPO"}, ("algorithm.class_name='MyPPO'", "PPO")),
        ({"algorithm.optimizer": "sgd"}, ("algorithm.optimizer='sgd'", "Adam")),
        ({"actor.class_name": "mine:Net"}, ("actor.class_name='mine:Net'", "canter.register")),
    ],
)
def test_unsupported_values_are_refused_by_key_and_remedy(changes, words):
    with pytest.raises(ImportRefused) as refused:
        import_config(changed(RSL_RL, changes))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm.gamma": "high"}, ("algorithm.gamma", "a number", "'high'")),
        ({"actor.hidden_dims": [-1]}, ("actor.hidden_dims", "-1 is the width of the input")),
        ({"actor.activation": "eli"}, ("actor.activation", "did you mean elu")),
        ({"actor.distribution_cfg.std_type": "exp"}, ("std_type", "scalar, log", "'exp'")),
        ({"obs_groups.actor": "policy"}, ("obs_groups.actor", "a list of observation groups")),
        ({"actor": "mlp"}, ("actor: expected a mapping, got 'mlp'",)),
        ({"algorithm.num_mini_batches": 5}, ("algorithm.num_mini_batches", "= 32, got 5", "--parity")),
        ({"algorithm.num_mini_batches": 3, "actor.rnn_type": "gru"}, ("with recurrent networks, = 4, got 3",)),
        ({"num_steps_per_env": 0}, ("num_steps_per_env", "above 0, got 0")),
        ({"algorithm.learning_rate": 0.5}, ("adaptive_kl", "0.5")),
    ],
)
def test_broken_values_name_key_value_and_remedy(changes, words):
    with pytest.raises(ConfigError) as broken:
        import_config(changed(RSL_RL, changes), num_envs=4)
    for word in words:
        assert word.lower() in str(broken.value).lower().replace("adaptivekl", "adaptive_kl")


def test_words_for_nothing_and_numbers_as_words_are_understood():
    found = import_config(changed(RSL_RL, {"algorithm.desired_kl": "None", "algorithm.learning_rate": "5e-4"}))
    assert found.config.algorithm.optimizer.learning_rate.initial == 5e-4
    assert not hasattr(found.config.algorithm.optimizer.learning_rate, "target_kl"), "it stays"


def test_recurrent_networks_drop_left_over_environments_like_rsl_rl():
    tree = changed(RSL_RL, {"algorithm.num_mini_batches": 3, "actor.rnn_type": "gru"})
    assert import_config(tree, parity=True, num_envs=4).config.algorithm.uneven_minibatches == "drop"


def test_canters_settings_are_not_taken_for_rsl_rls():
    assert generation_of(to_plain(replace(TrainConfig(), seed=1))) is None
    with pytest.raises(ConfigError, match="neither rl_games"):
        import_config({"algorithm": {"kind": "ppo"}})


def test_the_input_is_left_as_it_was():
    before = changed(RSL_RL, {})
    import_config(before, num_envs=4, parity=True)
    assert before == RSL_RL


def test_symmetry_becomes_the_extension_and_asks_for_mirrors():
    section = {"use_data_augmentation": True, "use_mirror_loss": True, "mirror_loss_coeff": 0.2}
    section |= {"data_augmentation_func": "robots.mdp:compute_symmetric_states"}
    imported = import_config(changed(RSL_RL, {"algorithm.symmetry_cfg": section}), parity=True, env="Pendulum-v1")
    (symmetry,) = imported.config.algorithm.extensions
    assert (symmetry.augment, symmetry.mirror_loss, symmetry.old_log_prob) == (True, 0.2, "repeated")
    assert any("EnvSpec.symmetries" in entry.why for entry in imported.report.of("changed"))
    with pytest.raises(ValueError, match="Pendulum-v1 declares none; set"):
        Trainer(imported.config)
    logged = import_config(changed(RSL_RL, {"algorithm.symmetry_cfg": section | dict.fromkeys(section, False)}))
    assert logged.config.algorithm.extensions == ()


def test_curiosity_becomes_the_extension_and_trains():
    rnd = {
        "weight": 0.5,
        "weight_schedule": {"mode": "step", "final_step": 8, "final_value": 0.1},
        "reward_normalization": True,
        "state_normalization": True,
        "learning_rate": 2e-3,
        "num_outputs": 4,
        "predictor_hidden_dims": [8],
        "target_hidden_dims": [6],
        "activation": "elu",
    }
    tree = changed(RSL_RL, {"algorithm__rnd_cfg": rnd, "obs_groups__rnd_state": ["policy"]})
    imported = import_config(tree, num_envs=4, env="tensor:pendulum")
    (found,) = imported.config.algorithm.extensions
    assert (found.hidden, found.target_hidden, found.outputs, found.error) == ((8,), (6,), 4, "norm")
    assert (found.weight.start, found.weight.end, found.weight.at) == (0.5, 0.1, 0.5), "8 of 2 x 8 steps"
    assert (found.normalize_obs, found.normalize_bonus, found.obs_groups) == (True, True, ("policy",))
    assert (found.epochs, found.num_minibatches, found.optimizer.learning_rate.initial) == (4, 2, 2e-3)
    assert sorted(entry.key for entry in imported.report.entries if entry.key) == sorted(leaves(tree))
    assert "env.step_dt" in next(e for e in imported.report.entries if e.key == "algorithm.rnd_cfg.weight").why
    (theirs,) = import_config(tree, num_envs=4, env="tensor:pendulum", parity=True).config.algorithm.extensions
    assert (found.variant, theirs.variant) == ("paper", "rsl_rl")
    with Trainer(imported.config) as trainer:
        trainer.learn()
    line = {"mode": "linear", "initial_step": 4, "final_step": 8, "final_value": 0.1}
    (found,) = import_config(
        changed(tree, {"algorithm__rnd_cfg": rnd | {"weight_schedule": line}})
    ).config.algorithm.extensions
    assert (found.weight.start, found.weight.end, found.weight.begin_at, found.weight.end_at) == (0.5, 0.1, 0.25, 0.5)
    for wrong, words in (
        ({"predictor_hidden_dims": [-1]}, "write it out"),
        ({"weight_schedule": {"mode": "cosine"}}, "expected one of constant, step, linear"),
    ):
        with pytest.raises(ConfigError, match=words):
            import_config(changed(tree, {"algorithm__rnd_cfg": rnd | wrong}), num_envs=4)


STUDENT = {
    "num_steps_per_env": 120,
    "max_iterations": 300,
    "save_interval": 50,
    "obs_groups": {"policy": ["policy"], "teacher": ["all"]},
    "policy": {
        "class_name": "StudentTeacherRecurrent",
        "init_noise_std": 0.2,
        "noise_std_type": "scalar",
        "student_obs_normalization": True,
        "teacher_obs_normalization": False,
        "student_hidden_dims": [32, 16],
        "teacher_hidden_dims": [64],
        "activation": "tanh",
        "rnn_type": "gru",
        "rnn_hidden_dim": 24,
        "rnn_num_layers": 2,
        "teacher_recurrent": False,
    },
    "algorithm": {
        "class_name": "Distillation",
        "num_learning_epochs": 2,
        "learning_rate": 2e-3,
        "gradient_length": 15,
        "max_grad_norm": None,
        "loss_type": "huber",
    },
}
SINCE_4 = {key: value for key, value in STUDENT.items() if key != "policy"} | {
    "obs_groups": {"student": ["policy"], "teacher": ["all"]},
    "student": {
        "class_name": "RNNModel",
        "hidden_dims": [32, 16],
        "activation": "tanh",
        "obs_normalization": True,
        "rnn_type": "gru",
        "rnn_hidden_dim": 24,
        "rnn_num_layers": 2,
        "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.2},
        "state_dependent_std": False,
    },
    "teacher": {"class_name": "MLPModel", "hidden_dims": [64]},
}


@pytest.mark.parametrize("tree", [STUDENT, SINCE_4], ids=["3.x", "5.x"])
def test_students_are_imported_and_ask_for_their_teacher(tree):
    imported = import_config(tree, num_envs=4, env="tensor:pendulum")
    found = imported.config.algorithm
    assert isinstance(found, DistillationConfig)
    assert (found.horizon, found.sequence_length, found.num_minibatches, found.epochs) == (120, 15, 8, 2)
    assert (found.loss, found.optimizer.learning_rate.initial, found.optimizer.max_grad_norm) == (
        "huber",
        2e-3,
        math.inf,
    )
    policy: Any = found.policy
    assert (policy.hidden, policy.activation, policy.normalize_obs) == ((32, 16), "tanh", True)
    memory = policy.rnn
    assert (memory.cell, memory.hidden, memory.layers, found.std.initial) == ("gru", 24, 2, 0.2)
    assert policy.obs_groups == ("policy",) and imported.config.env.num_envs == 4
    entries = imported.report.entries
    assert sorted(entry.key for entry in entries if entry.key) == sorted(leaves(tree))
    assert any("name its file" in entry.line() for entry in entries)
    with pytest.raises(ValueError, match="teacher is empty"):
        Trainer(imported.config)


def test_a_range_of_the_std_is_kept_with_parity_too():
    changes = {"actor.distribution_cfg.std_range": (0.1, 2.0)}
    for parity in (True, False):
        imported = import_config(changed(RSL_RL, changes), parity=parity)
        std = imported.config.algorithm.model.std
        assert (std.form, std.minimum, std.maximum) == ("bounded", 0.1, 2.0)
    with pytest.raises(ConfigError, match="std_range: expected two numbers"):
        import_config(changed(RSL_RL, {"actor.distribution_cfg.std_range": [2.0]}))


FULL = {
    "algorithm.rnd_cfg": {
        "weight": 0.1,
        "predictor_hidden_dims": [8],
        "target_hidden_dims": [8],
        "weight_schedule": {"mode": "step", "final_step": 10, "final_value": 0.0},
    },
    "algorithm.symmetry_cfg": {"use_data_augmentation": True, "data_augmentation_func": "a:b"},
    "actor.cnn_cfg": {"output_channels": [8, 8], "kernel_size": [3, 3], "stride": 1, "padding": "zeros"},
    "critic.rnn_type": "lstm",
}
STUDENT = {
    "num_steps_per_env": 8,
    "student": {"hidden_dims": [8], "distribution_cfg": {"init_std": 0.1}},
    "obs_groups": {"student": ["policy"]},
    "algorithm": {"class_name": "Distillation", "num_learning_epochs": 2, "gradient_length": 4},
}


@pytest.mark.parametrize("tree", [*GENERATIONS.values(), changed(RSL_RL, FULL), STUDENT])
def test_nothing_is_dropped_silently_and_nothing_crashes(tree):
    assert not silent(tree, num_envs=8) and not crashes(tree, num_envs=8)


def test_errors_name_rsl_rls_key_of_a_nested_setting():
    for changes, key in (
        ({"actor.distribution_cfg.init_std": -1.0}, "actor.distribution_cfg.init_std=-1.0 became"),
        ({"algorithm.desired_kl": -1.0}, "algorithm.desired_kl=-1.0 became"),
        ({**FULL, "algorithm.rnd_cfg.num_outputs": -1}, "algorithm.rnd_cfg={'weight'"),
    ):
        with pytest.raises(ConfigError, match=key):
            import_config(changed(RSL_RL, changes), num_envs=8)


def test_the_files_own_limit_of_actions_reaches_a_robots_environment():
    own = import_config(changed(RSL_RL, {"clip_actions": 2.0}), num_envs=8, env="mjlab:Any")
    assert own.config.env.options == {"clip_actions": 2.0}


def test_a_distillation_config_of_isaac_lab_with_an_unset_normalization():
    imported = import_config(STUDENT | {"empirical_normalization": None}, num_envs=4)
    entry = next(e for e in imported.report.entries if e.key == "empirical_normalization")
    assert (entry.status, entry.to) == ("mapped", "off")
