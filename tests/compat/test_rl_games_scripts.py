"""What scripts do with rl_games' Runner besides training: environment states, observers, files and ignored keys."""

from typing import Any

import pytest
import torch
from test_rl_games_config import sac
from test_rl_games_runner import N, VecEnv, Watching, points, settings  # noqa: F401
from theirs import REMOVED, rl_games

from canter.compat import import_config
from canter.compat.pickled_file import read_pickled
from canter.compat.rl_games import Agent, Runner, env_configurations, vecenv
from canter.compat.rl_games.hooks import refuse_overrides
from canter.core.plain import ConfigError
from canter.training.guard import RunFailed


def test_the_state_of_the_environment_is_saved_and_restored(tmp_path, points, monkeypatch):  # noqa: F811
    monkeypatch.setattr(VecEnv, "get_env_state", lambda self: {"level": self.told[-1], "names": ["a"]}, raising=False)
    monkeypatch.setattr(VecEnv, "set_env_state", lambda self, state: setattr(self, "state", state), raising=False)
    runner = Runner()
    runner.load(settings(tmp_path))
    runner.run({"train": True})
    file = str(tmp_path / "exp" / "nn" / "small.pth")
    saved = read_pickled(file)["env_state"]
    assert saved["names"] == ["a"] and saved["level"] in (0, 128)
    again = Runner()
    again.load(settings(tmp_path, config__max_epochs=3))
    again.run({"train": True, "checkpoint": file})
    assert points[-1].state == saved
    again.run({"play": True, "checkpoint": file})
    assert len(points) == 3 and points[-1].state == read_pickled(file)["env_state"], "a player continues it too"


def test_an_epoch_prints_rl_games_line_unless_print_stats_is_off(tmp_path, capsys):
    for shown in (True, False):
        runner = Runner()
        runner.load(settings(tmp_path, config__print_stats=shown))
        runner.run({"train": True})
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fps step: ")]
        assert len(lines) == 2 * shown
        if shown:
            assert "fps step and policy inference: " in lines[1] and lines[1].endswith(" epoch: 2/2 frames: 256")


def test_a_player_prints_games_as_they_end_unless_print_stats_is_off(tmp_path, capsys):
    for shown in (True, False):
        runner = Runner()
        player = {"games_num": 2 * N, "deterministic": True, "print_stats": shown}
        runner.load(settings(tmp_path, config__player=player))
        mean = runner.run({"play": True})
        lines = capsys.readouterr().out.splitlines()
        games = [line for line in lines if line.startswith("reward: ")]
        assert len(games) == 2 * shown, "all environments end together, after 10 steps"
        assert all(line.endswith("steps: 10.0") for line in games)
        if shown:
            assert sum(float(line.split()[1]) for line in games) / 2 == pytest.approx(mean, abs=0.01)
        assert lines[-1].startswith("av reward: ")


CENTRAL: dict[str, Any] = {
    "minibatch_size": 64,
    "mini_epochs": 2,
    "learning_rate": 1e-3,
    "clip_value": False,
    "normalize_input": True,
    "network": {
        "name": "actor_critic",
        "central_value": True,
        "mlp": {"units": [8], "activation": "relu", "initializer": {"name": "default"}},
    },
}


class World(VecEnv):
    """Several agents, and one state for all of them, as rl_games' multi-agent environments return it."""

    def _obs(self):
        obs: Any = super()._obs()
        return {"obs": obs["obs"], "states": obs["states"][:: self.agents]}


def test_agents_share_the_state_of_their_environment(tmp_path):
    vecenv.register("WORLD", lambda name, num_actors, **options: World(num_actors, **options))
    env_configurations.register("world", {"vecenv_type": "WORLD", "env_creator": lambda **_: None})
    own = {"config__env_name": "world", "config__env_config": {"agents": 2, "states": True}}
    runner = Runner()
    runner.load(settings(tmp_path, config__central_value_config=CENTRAL, **own))
    runner.run({"train": True})
    central = runner.agent.imported.config.algorithm.central_value
    assert central.num_minibatches == 16 * N // 64, "of worlds, not of agents"
    assert central.agents == "first"
    phase = runner.agent.algorithm.phases["central_value"]
    samples = {"value": torch.arange(4 * N).view(1, -1)}
    assert torch.equal(phase.select(samples)["value"], samples["value"][:, ::2]), "one sample of each world"
    step = runner.agent.vec_env.groups(runner.agent.vec_env.env._obs())
    assert len(step["policy"]) == len(step["critic"]) == 2 * N
    assert torch.equal(step["critic"][0], step["critic"][1]) and not torch.equal(step["critic"][1], step["critic"][2])


def test_an_agent_keeps_the_numbers_of_the_release_that_is_asked_for(tmp_path, monkeypatch):
    for release, bootstraps in (("rl_games-1.6.1", False), ("rl_games-1.6.5", True)):
        monkeypatch.setattr(Agent, "release", release)
        runner = Runner()
        runner.load(settings(tmp_path, config__max_epochs=1))
        runner.run({"train": True})
        assert runner.agent.algorithm.config.bootstrap_truncated is bootstraps
        assert runner.agent.imported.report.dialect.startswith(f"rl_games {release[9:]} (")


def test_an_agent_prints_the_release_which_is_the_installed_one(tmp_path, monkeypatch, capsys):
    for installed in ("1.6.1", "1.6.5", "2.0.0"):
        monkeypatch.setattr("canter.compat.settings.rl_games.installed_version", lambda version=installed: version)
        runner = Runner()
        runner.load(settings(tmp_path, config__max_epochs=1))
        runner.run({"train": True})
        assert f"(as rl_games {installed} is installed; --source names another)" in capsys.readouterr().out
        assert runner.agent.algorithm.config.bootstrap_truncated is (installed != "1.6.1")


def test_a_recurrent_central_value_takes_rl_games_steps_with_parity():
    recurrent = CENTRAL | {"network": CENTRAL["network"] | {"rnn": {"name": "lstm", "units": 4, "layers": 1}}}
    given = rl_games(config__central_value_config=recurrent)
    for agents in (1, 2):
        exact, theirs = (import_config(given, parity=parity, agents=agents) for parity in (False, True))
        assert theirs.config.algorithm.central_value.recurrence == "rl_games"
        assert "takes two on the last one" in exact.report.text()
        assert ("episode ends of other worlds" in exact.report.text()) == (agents == 2)
        assert not any("worlds" in entry.why or "takes two" in entry.why for entry in theirs.report.entries)


@pytest.mark.parametrize("resets", [True, False])
def test_episode_ends_reset_the_recurrent_state_of_the_central_value_as_that_of_the_policy(resets):
    rnn = {"name": "lstm", "units": 4, "layers": 1}
    recurrent = CENTRAL | {"network": CENTRAL["network"] | {"rnn": rnn}}
    given = rl_games(config__central_value_config=recurrent, network__rnn=rnn, config__zero_rnn_on_done=resets)
    imported = import_config(given, parity=True)
    model = imported.config.algorithm.model
    assert model.policy.rnn.reset_on_end is model.critic.rnn.reset_on_end is resets
    assert ("but resets it in learning" in imported.report.text()) is not resets


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network__mlp__d2rl": True}, r"model\.policy\.d2rl=true: no file of rl_games"),
        ({"network__normalization": "layer_norm"}, r"model\.policy\.layer_norm=true: no file of rl_games"),
        (
            {"network__separate": True, "config__central_value_config": CENTRAL},
            r"network\.separate=True with central",
        ),
    ],
)
def test_settings_whose_files_rl_games_cannot_load_are_refused_before_training(tmp_path, changes, words):
    runner = Runner()
    states = {"config__env_config": {"states": True}} if "config__central_value_config" in changes else {}
    runner.load(settings(tmp_path, **changes, **states))
    with pytest.raises(ConfigError, match=words):
        runner.run({"train": True})


def test_keys_may_be_ignored_in_training_and_play_and_the_message_says_how(tmp_path):
    config = settings(tmp_path, config__mystery=3)
    runner = Runner()
    runner.load(config)
    with pytest.raises(ConfigError, match=r"ignore=\['params\.config\.mystery'\] in a script"):
        runner.run({"train": True})
    runner = Runner(ignore=["params.config.mystery"])
    runner.load(config)
    runner.run({"train": True})
    assert runner.agent.epoch_num == 2
    file = next((tmp_path / "exp" / "nn").glob("last_small_ep_2_*.pth"))
    assert isinstance(runner.run({"play": True, "checkpoint": str(file)}), float)


def test_keys_to_ignore_are_a_list(tmp_path):
    runner = Runner(ignore="params.config.mystery")
    runner.load(settings(tmp_path, config__mystery=3))
    with pytest.raises(ConfigError, match=r"ignore='params\.config\.mystery': expected a list of keys"):
        runner.run({"train": True})


@pytest.mark.parametrize("given", [{}, {"params": {"algo": {"name": "a2c_continuous"}}}, "pendulum.yaml"])
def test_other_settings_are_refused_when_they_are_loaded(given):
    with pytest.raises(ConfigError, match=r"expected {'params': {'algo': \.\.\., 'config': \.\.\.}}"):
        Runner().load(given)


@pytest.mark.parametrize("number", [REMOVED, -1, "${resolve_default:16,${...num_envs}}"])
def test_a_number_of_environments_that_a_script_has_to_fill_in_is_asked_for(tmp_path, number):
    for args in ({"train": True}, {"play": True}):
        runner = Runner()
        runner.load(settings(tmp_path, config__num_actors=number))
        with pytest.raises(ConfigError, match=r"params\.config\.num_actors=.*: expected a whole number above 0"):
            runner.run(args)


def test_the_state_before_a_failure_is_saved_and_named(tmp_path, points, monkeypatch):  # noqa: F811
    step = VecEnv.step

    def fails_late(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 40:  # in the third epoch
            raise RuntimeError("the simulator died")
        return step(self, action)

    monkeypatch.setattr(VecEnv, "step", fails_late)
    runner = Runner()
    runner.load(settings(tmp_path, config__max_epochs=5, config__save_best_after=100))
    with pytest.raises(RunFailed, match=r"the simulator died.*\. The newest state is in .*last_small_ep_2_rew_.*\.pth"):
        runner.run({"train": True})
    (file,) = (tmp_path / "exp" / "nn").glob("*.pth")
    monkeypatch.setattr(VecEnv, "step", step)
    again = Runner()
    again.load(settings(tmp_path, config__max_epochs=3))
    again.run({"train": True, "checkpoint": str(file)})
    assert again.agent.epoch_num == 3, "one more epoch than in the file"


def test_keys_may_be_ignored_of_an_environment_that_canter_knows(tmp_path):
    runner = Runner(ignore=["params.config.mystery"])
    runner.load(settings(tmp_path, config__mystery=3, config__env_name="Pendulum-v1", config__max_epochs=1))
    runner.run({"train": True})
    assert runner.agent.epoch_num == 1


class Reader(Watching):
    """An observer that keeps what real observers read of the agent after each epoch."""

    def after_clear_stats(self):
        self.calls.append("after_clear_stats")

    def after_print_stats(self, frame, epoch_num, total_time):
        algo = self.algo
        rate = algo.optimizer.param_groups[0]["lr"]
        self.rows = [*getattr(self, "rows", []), (algo.last_lr, rate, algo.game_rewards.current_size)]
        self.mean = algo.game_rewards.get_mean()
        self.more = (algo.global_rank, algo.is_rnn, algo.games_to_track, algo.train_dir, algo.experiment_name)
        self.names = {name for name, _ in algo.model.named_parameters()}


def observed(config):
    observer: Any = Reader()
    runner = Runner(observer)
    runner.load(config)
    runner.run({"train": True})
    return observer, runner.agent


def test_observers_read_what_they_read_of_rl_games_agents(tmp_path):
    observer, agent = observed(settings(tmp_path, config__max_epochs=3, config__games_to_track=20))
    assert [row[2] for row in observer.rows] == [8, 20, 20], "games of 10 steps, up to games_to_track"
    assert all(last_lr == rate > 0 for last_lr, rate, _ in observer.rows)
    assert observer.mean.shape == (1,) and observer.mean[0] == pytest.approx(agent.mean_rewards)
    assert observer.more == (0, False, 20, str(tmp_path), "exp")
    assert observer.names == {name for name, _ in agent.algorithm.model.named_parameters()}
    assert observer.calls.count("after_clear_stats") == 1
    with pytest.raises(TypeError, match="item assignment"):
        agent.optimizer.param_groups[0]["lr"] = 1.0


def test_observers_see_a_recurrent_agent_the_rank_and_sac(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    rnn = {"name": "gru", "units": 4, "layers": 1, "before_mlp": True}
    observer, agent = observed(settings(tmp_path, network__rnn=rnn, config__seq_length=4))
    assert agent.is_rnn and observer.more[:2] == (0, True)
    own = {"train_dir": str(tmp_path), "full_experiment_name": "sac", "device": "cpu", "env_name": "points"}
    observer, agent = observed(sac(**own, env_config={}, max_epochs=4))
    assert not agent.is_rnn and observer.rows[-1][0] == pytest.approx(2e-4) and "log_alpha.log" in observer.names


def test_an_agent_that_only_writes_statistics_is_told_of_the_observer():
    own = type("A2CAgent", (), {"__module__": "rl_games.algos_torch.a2c_continuous"})
    mine = type("Mine", (own,), {"write_stats": lambda self: None})
    with pytest.raises(ConfigError, match=r"Mine changes the inside.*Use write_stats: AlgoObserver\.after_print_stats"):
        refuse_overrides(mine)
