"""What scripts do with RSL-RL's runner besides training: logs, services, curiosity, ignored keys and older names."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_rsl_rl_runner import OBS, Robots, scalars, settings

from canter.compat import drop_in
from canter.compat.pickled_file import read_pickled
from canter.compat.rsl_rl import OnPolicyRunner
from canter.core.plain import ConfigError
from canter.training.guard import RunFailed, RunStopped


def test_an_iteration_prints_rsl_rls_block_and_a_subclass_may_log(tmp_path, capsys):
    class Mine(OnPolicyRunner):
        def log(self, locs, width=80, pad=35):
            super().log(locs, width, pad)
            assert locs["collection_time"] > 0 and {"surrogate", "value"} <= set(locs["loss_dict"])
            self.logger.writer.add_scalar("Mine/it", locs["it"], locs["it"])

    Mine(Robots(), settings(), log_dir=str(tmp_path), device="cpu").learn(2)
    text = capsys.readouterr().out
    assert "Learning iteration 0/2" in text and "Learning iteration 1/2" in text
    for name in ("Total steps: 128", "Mean surrogate loss:", "Mean action std:", "reward/distance:", "ETA:"):
        assert name in text
    assert scalars(tmp_path)["Mine/it"] == [0, 1]
    OnPolicyRunner(Robots(), settings(), log_dir=None, device="cpu").learn(1)
    assert capsys.readouterr().out == "", "as in RSL-RL"


class FakeRun:
    def __init__(self):
        self.rows, self.files, self.finished = [], [], 0

    def log(self, row, step):
        self.rows.append((row, step))

    def save(self, path, base_path):
        self.files.append(Path(path).name)

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize(
    "logger",
    [
        {"logger": "wandb", "wandb_project": "robots"},
        {"logger": {"class_name": "WandbLogWriter", "project_name": "robots"}},
    ],
)
def test_wandb_gets_scalars_and_files(tmp_path, monkeypatch, logger):
    run, given = FakeRun(), {}
    fake = SimpleNamespace(login=lambda **_: False, init=lambda **options: given.update(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    runner = OnPolicyRunner(Robots(), settings(**logger), log_dir=str(tmp_path / "walk"), device="cpu")
    runner.learn(2)
    assert (runner.logger_type, given["project"], given["name"]) == ("wandb", "robots", "walk")
    assert given["mode"] == "offline", "without a login"
    assert given["config"]["train_cfg"]["num_steps_per_env"] == 8
    assert {"Loss/value", "Policy/mean_std"} <= {tag for row, _ in run.rows for tag in row} and run.rows[-1][1] == 1
    assert "model_1.pt" in run.files and run.finished == 1
    assert "Loss/value" in scalars(tmp_path / "walk"), "and TensorBoard, as in RSL-RL"


def test_neptune_gets_scalars(tmp_path, monkeypatch):
    class Field(list):
        def append(self, value, step=None):
            super().append((value, step))

        upload = append

    class Run(dict):
        def __missing__(self, name):
            return self.setdefault(name, Field())

        def stop(self):
            self.stopped = True

    run, given = Run(), {}
    fake = SimpleNamespace(
        init_run=lambda **options: given.update(options) or run,
        utils=SimpleNamespace(stringify_unsupported=lambda tree: tree),
    )
    monkeypatch.setitem(sys.modules, "neptune", fake)
    monkeypatch.setenv("NEPTUNE_USERNAME", "lab")
    monkeypatch.setenv("NEPTUNE_API_TOKEN", "x")
    config = settings(logger="neptune", neptune_project="robots")
    OnPolicyRunner(Robots(), config, log_dir=str(tmp_path), device="cpu").learn(2)
    assert given["project"] == "lab/robots" and len(run["Loss/value"]) == 2 and run.stopped


@pytest.mark.parametrize(
    ("logger", "words"),
    [
        ("wandb", "logger=wandb: pip install wandb; until then only TensorBoard's files are written"),
        ("neptune", "logger=neptune: pip install neptune; until then"),
        ("mine:Writer", "logger='mine:Writer' is not known (tensorboard, wandb, neptune)"),
    ],
)
def test_a_service_that_is_not_there_costs_one_line(tmp_path, monkeypatch, caplog, logger, words):
    drop_in._say_once.cache_clear()
    monkeypatch.setitem(sys.modules, logger, None)
    runner = OnPolicyRunner(Robots(), settings(logger=logger), log_dir=str(tmp_path), device="cpu")
    runner.learn(1)
    runner.learn(1)
    assert caplog.text.count(words) == 1
    assert "Loss/value" in scalars(tmp_path)


CURIOUS = {
    "weight": 0.5,
    "reward_normalization": True,
    "state_normalization": True,
    "num_outputs": 3,
    "predictor_hidden_dims": [8],
    "target_hidden_dims": [6],
}


def curious(generation=5, step_dt: float | None = 0.02, **changes):
    env: Any = Robots(generation)
    env.step_dt = step_dt
    groups = {} if generation < 3 else {"obs_groups__rnd_state": ["policy"]}
    return OnPolicyRunner(env, settings(generation, algorithm__rnd_cfg=CURIOUS | changes, **groups), device="cpu")


@pytest.mark.parametrize("generation", [2, 3, 5])
def test_curiosity_has_the_time_step_and_goes_through_files(tmp_path, generation):
    runner = curious(generation)
    (rnd,) = runner.alg.ppo.extensions
    assert rnd.config.weight.initial == pytest.approx(0.01), "0.5 times the time step, as in RSL-RL"
    runner.learn(2)
    runner.save(str(tmp_path / "a.pt"))
    tree = read_pickled(tmp_path / "a.pt")
    names = [f"{net}.{i}.{part}" for net in ("predictor", "target") for i in (0, 2) for part in ("weight", "bias")]
    assert {*names, "state_normalizer._mean", "reward_normalizer.emp_norm._std"} <= set(tree["rnd_state_dict"])
    assert tree["rnd_state_dict"]["predictor.0.weight"].shape == (8, OBS)
    assert len(tree["rnd_optimizer_state_dict"]["state"]) == 4
    other = curious(generation)
    (new,) = other.alg.ppo.extensions
    other.load(str(tmp_path / "a.pt"))
    obs = {name: torch.randn(5, OBS) for name in new.groups}
    scores = [part.raw_bonus(part.normalizer(part.flat(obs))) for part in (new, rnd)]
    torch.testing.assert_close(*scores, atol=1e-6, rtol=0)
    torch.testing.assert_close(new.bonus_statistics.scale, rnd.bonus_statistics.scale)
    moments = [next(iter(part.phase.optimizer.groups.values())).adam for part in (new, rnd)]
    torch.testing.assert_close(moments[0].exp_avg, moments[1].exp_avg)
    assert moments[0].step == moments[1].step > 0


def test_curiosity_that_a_file_or_an_environment_lacks_is_named(tmp_path, caplog):
    plain = OnPolicyRunner(Robots(), settings(), device="cpu")
    plain.save(str(tmp_path / "plain.pt"))
    curious().load(str(tmp_path / "plain.pt"))
    assert "the file has no rnd_state_dict" in caplog.text
    with pytest.raises(ConfigError, match=r"rnd_cfg\.weight: RSL-RL multiplies it by env\.unwrapped\.step_dt"):
        curious(step_dt=None)


@pytest.mark.parametrize(
    ("schedule", "weights"),
    [
        ({"mode": "constant"}, [0.01] * 4),
        ({"mode": "step", "final_step": 12, "final_value": 0.1}, [0.01, 0.01, 0.1, 0.1]),
        ({"mode": "linear", "initial_step": 4, "final_step": 20, "final_value": 0.09}, [0.01, 0.03, 0.07, 0.09]),
    ],
)
def test_curiositys_schedule_counts_the_steps_of_each_environment(schedule, weights):
    """By hand: rollouts of 8 steps begin after 0, 8, 16 and 24 steps."""
    runner = curious(weight_schedule=schedule)
    (rnd,) = runner.alg.ppo.extensions
    found = []
    for _ in weights:
        runner.learn(1)
        found.append(float(rnd.weight))
    assert found == pytest.approx(weights)
    entries = {entry.key: entry for entry in runner.report.entries if "weight_schedule" in entry.key}
    differs = schedule["mode"] != "constant"
    assert ("between rollouts" in entries["algorithm.rnd_cfg.weight_schedule.mode"].why) == differs


def test_keys_may_be_ignored():
    with pytest.raises(ConfigError, match=r"ignore=\['algorithm\.mystery'\] in a script"):
        OnPolicyRunner(Robots(), settings(algorithm__mystery=3), device="cpu")
    OnPolicyRunner(Robots(), settings(algorithm__mystery=3), device="cpu", ignore=["algorithm.mystery"])


class FailsLate(Robots):
    """A simulator that dies in the third iteration."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > 20:
            raise RuntimeError("the simulator died")
        return super().step(action)


def test_the_state_before_a_failure_is_saved_and_named(tmp_path):
    runner = OnPolicyRunner(FailsLate(), settings(save_interval=50), log_dir=str(tmp_path), device="cpu")
    with pytest.raises(RunFailed, match=r"the simulator died.*\. The newest state is in .*model_1\.pt"):
        runner.learn(5)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["model_0.pt", "model_1.pt"]
    again = OnPolicyRunner(Robots(), settings(), device="cpu")
    again.load(str(tmp_path / "model_1.pt"))
    assert again.current_learning_iteration == 1
    with pytest.raises(RunFailed, match=r"Nothing was saved, as there is no log_dir"):
        OnPolicyRunner(FailsLate(), settings(), device="cpu").learn(5)


def test_a_run_that_is_stopped_saves_its_state_and_names_the_file(tmp_path):
    class Stops(Robots):
        steps = 0

        def step(self, action):
            self.steps += 1
            if self.steps == 20:
                signal.raise_signal(signal.SIGINT)
            return super().step(action)

    runner = OnPolicyRunner(Stops(), settings(save_interval=50), log_dir=str(tmp_path), device="cpu")
    with pytest.raises(RunStopped) as stopped:
        runner.learn(5)
    assert stopped.value.__notes__ == [f"The newest state is in {tmp_path / 'model_2.pt'}"]
    assert read_pickled(tmp_path / "model_2.pt")["iter"] == 2


def test_a_run_that_is_killed_while_it_saves_keeps_the_file_before(tmp_path, monkeypatch):
    runner = OnPolicyRunner(Robots(), settings(), device="cpu")
    runner.save(str(tmp_path / "model.pt"))
    before = (tmp_path / "model.pt").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("canter.core.storage.files.os.rename", killed)
    runner.current_learning_iteration = 7
    with pytest.raises(KeyboardInterrupt):
        runner.save(str(tmp_path / "model.pt"))
    assert (tmp_path / "model.pt").read_bytes() == before


def test_names_of_older_scripts():
    runner = OnPolicyRunner(Robots(), settings(), device="cpu")
    policy, obs = runner.alg.policy, torch.randn(3, OBS)
    torch.testing.assert_close(policy.std, torch.full((2,), 0.5))
    assert torch.equal(policy.action_std, policy.std) and torch.equal(policy.output_std, policy.std)
    assert torch.equal(policy.act_inference(obs), runner.get_inference_policy()(obs))
    assert float(runner.alg.optimizer.learning_rate) == runner.alg.learning_rate == pytest.approx(1e-3)
    (group,) = runner.alg.optimizer.param_groups
    assert group["lr"] == runner.alg.learning_rate and sum(map(torch.numel, group["params"])) > 0
    with pytest.raises(TypeError, match="item assignment"):
        group["lr"] = 1.0


@pytest.mark.parametrize("normalized", [True, False])
def test_obs_normalizer_is_that_of_the_policy_or_changes_nothing(normalized):
    runner = OnPolicyRunner(Robots(2), settings(2, empirical_normalization=normalized), device="cpu")
    runner.learn(2)
    obs = 3 * torch.randn(5, OBS) + 1
    (normalizer,) = runner.alg.ppo.policy.actor.network.normalizers
    expected = obs
    if normalized:
        std = (normalizer.m2 / normalizer.count).sqrt()
        expected = ((obs - normalizer.mean) / (std + 0.01)).float()  # RSL-RL's, by hand
    torch.testing.assert_close(runner.obs_normalizer(obs), expected, atol=1e-5, rtol=0)
    layers = runner.alg.actor_critic.actor
    torch.testing.assert_close(layers(runner.obs_normalizer(obs)), runner.get_inference_policy()(obs))


def learned_file(tmp_path, generation=5, **changes):
    """The file of a short run, and the runner."""
    runner = OnPolicyRunner(Robots(generation), settings(generation, **changes), log_dir=str(tmp_path), device="cpu")
    runner.learn(2)
    return read_pickled(tmp_path / "model_1.pt"), runner


@pytest.mark.parametrize("kind", ["scalar", "log"])
def test_a_std_with_a_range_is_written_by_the_name_that_its_settings_load(tmp_path, kind):
    cfg = {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": kind, "std_range": [0.1, 2.0]}
    tree, runner = learned_file(tmp_path, actor__distribution_cfg=cfg)
    name = "distribution.log_std_param" if kind == "log" else "distribution.std_param"
    stds = [key for key in tree["actor_state_dict"] if "std_param" in key]
    assert stds == [name], "the only one that RSL-RL's distribution has"
    value = tree["actor_state_dict"][name]
    torch.testing.assert_close(value.exp() if kind == "log" else value, runner.alg.policy.std)
    other = OnPolicyRunner(Robots(), settings(actor__distribution_cfg=cfg), device="cpu")
    other.load(str(tmp_path / "model_1.pt"))
    torch.testing.assert_close(other.alg.policy.std, runner.alg.policy.std)


def test_a_recurrent_policy_of_2_does_not_read_noise_std_type(tmp_path):
    lstm = {"class_name": "ActorCriticRecurrent", "rnn_type": "lstm", "rnn_hidden_size": 8, "noise_std_type": "log"}
    lstm |= {"init_noise_std": 0.5, "actor_hidden_dims": [8], "critic_hidden_dims": [8], "activation": "elu"}
    tree, runner = learned_file(tmp_path, 2, policy=lstm)
    assert "std" in tree["model_state_dict"] and "log_std" not in tree["model_state_dict"]
    assert "recurrent policies of 2.x do not read it" in runner.report.text()
    third, _ = learned_file(tmp_path / "third", 3, policy=lstm)
    assert "log_std" in third["model_state_dict"], "since 3.0 they read it"


def test_settings_whose_files_rsl_rl_cannot_load_are_refused_before_training(tmp_path):
    cfg = {"class_name": "HeteroscedasticGaussianDistribution", "init_std": 0.5, "std_range": [0.1, 2.0]}
    changes = {"actor__distribution_cfg": cfg}
    with pytest.raises(ConfigError, match=r"std\.form=bounded of a std from the network is not RSL-RL's"):
        OnPolicyRunner(Robots(), settings(**changes), log_dir=str(tmp_path), device="cpu")
    OnPolicyRunner(Robots(), settings(**changes), log_dir=None, device="cpu").learn(1)


def test_a_beta_distribution_trains_within_its_range_and_goes_through_files(tmp_path):
    cfg = {"class_name": "BetaDistribution", "action_range": [-0.5, 2.0]}
    tree, runner = learned_file(tmp_path, actor__distribution_cfg=cfg)
    names = [name for name in tree["actor_state_dict"] if "normalizer" not in name]
    assert names == [f"mlp.{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")], "RSL-RL's has no parameters"
    assert tree["actor_state_dict"]["mlp.4.weight"].shape == (4, 16)
    obs = {"policy": torch.randn(50, OBS)}
    actions = runner.alg.policy(obs, stochastic_output=True)
    assert float(actions.min()) > -0.5 and float(actions.max()) < 2.0 and float(actions.std()) > 0.3
    # RSL-RL's log-probability, by torch: concentrations 1 + softplus, first half first.
    params, _ = runner.alg.ppo.policy.params(obs, ())
    alpha, beta = (1 + torch.nn.functional.softplus(params)).split(2, -1)
    theirs = torch.distributions.Beta(alpha, beta).log_prob((actions + 0.5) / 2.5) - torch.log(torch.tensor(2.5))
    ours = runner.alg.ppo.policy.distribution.log_prob(params, (actions + 0.5) / 2.5)
    torch.testing.assert_close(ours, theirs.sum(-1), atol=1e-4, rtol=1e-4)
    other = OnPolicyRunner(Robots(), settings(actor__distribution_cfg=cfg), device="cpu")
    other.load(str(tmp_path / "model_1.pt"))
    torch.testing.assert_close(other.alg.policy(obs), runner.alg.policy(obs))
    assert "RSL-RL's are its mean" in runner.report.text()


def test_a_beta_distribution_has_rsl_rls_default_range_and_refuses_other_arguments():
    runner = OnPolicyRunner(
        Robots(), settings(actor__distribution_cfg={"class_name": "BetaDistribution"}), device="cpu"
    )
    assert runner.trainer.config.algorithm.model.action_range == (-1.0, 1.0)
    for key, value in (("action_range", [1.0, -1.0]), ("init_std", 0.5)):
        cfg = {"class_name": "BetaDistribution", key: value}
        with pytest.raises(ConfigError, match=rf"distribution_cfg\.{key}"):
            OnPolicyRunner(Robots(), settings(actor__distribution_cfg=cfg), device="cpu")
