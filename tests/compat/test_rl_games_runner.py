"""rl_games' Runner over Canter: environments, observers, players and files as its scripts use them."""

import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from test_rl_games_config import AMP, sac
from test_rsl_rl_runner import scalars
from theirs import rl_games

import canter
from canter.app.cli import main
from canter.app.experiments import scores
from canter.compat import import_config, import_run
from canter.compat.pickled_file import CheckpointRefused, read_pickled
from canter.compat.rl_games import Agent, AlgoObserver, PpoPlayer, Runner, env_configurations, model_builder, vecenv
from canter.compat.rl_games.checkpoint import discriminator_of
from canter.compat.rl_games.env import AmpEnv, RlGamesEnv
from canter.core.plain import ConfigError
from canter.core.specs import ACTION_MASK, MultiDiscrete

OBS, N = 3, 8


class VecEnv:
    """Points that are paid for standing at the origin, as an `IVecEnv`."""

    def __init__(self, num_actors=N, tensors=True, discrete=False, agents=1, states=False):
        self.rows, self.tensors, self.discrete, self.agents = num_actors * agents, tensors, discrete, agents
        self.states, self.told = states, []
        self.random = np.random.RandomState(0)

    def get_env_info(self):
        space = gymnasium.spaces.Discrete(3) if self.discrete else gymnasium.spaces.Box(-2.0, 2.0, (1,))
        return {"observation_space": gymnasium.spaces.Box(-9, 9, (OBS,)), "action_space": space, "agents": self.agents}

    def _give(self, array):
        return torch.from_numpy(array) if self.tensors else array

    def _obs(self):
        obs = self._give(self.place.astype(np.float32))
        return (
            {"obs": obs, "states": self._give(np.hstack([self.place] * 2).astype(np.float32))} if self.states else obs
        )

    def reset(self):
        self.place, self.age = self.random.randn(self.rows, OBS), np.zeros(self.rows, int)
        return self._obs()

    def step(self, action):
        assert isinstance(action, torch.Tensor) == self.tensors
        action = np.asarray(action)
        self.place[:, 0] += 0.3 * (action - 1 if self.discrete else action[:, 0])
        reward = -np.abs(self.place[:, 0])
        self.age += 1
        cut = self.age >= 10
        self.place[cut], self.age[cut] = self.random.randn(int(cut.sum()), OBS), 0
        infos = {"time_outs": self._give(cut), "episode": {"distance": torch.tensor(1.5)}}
        return self._obs(), self._give(reward.astype(np.float32)), self._give(cut), infos

    def get_action_masks(self):
        return np.tile([True, False, True], (self.rows, 1))

    def set_train_info(self, frame, algo):
        self.told.append(frame)


def settings(tmp_path, **changes):
    own = {
        "config__train_dir": str(tmp_path),
        "config__full_experiment_name": "exp",
        "config__device": "cpu",
        "config__env_name": "points",
        "config__save_best_after": 1,
        "config__player": {"games_num": 8, "deterministic": True},
    }
    return rl_games(**own | changes)


@pytest.fixture(autouse=True)
def points():
    made = []

    def create(name, num_actors, **options):
        made.append(VecEnv(num_actors, **options))
        return made[-1]

    vecenv.register("POINTS", create)
    env_configurations.register("points", {"vecenv_type": "POINTS", "env_creator": lambda **_: None})
    return made


class Watching(AlgoObserver):
    def __init__(self):
        self.calls, self.infos = [], 0

    def before_init(self, base_name, config, experiment_name):
        self.calls.append(("before_init", experiment_name))

    def after_init(self, algo):
        self.algo = algo
        self.calls.append("after_init")

    def process_infos(self, infos, done_indices):
        self.infos += 1

    def after_steps(self):
        self.calls.append("after_steps")

    def after_print_stats(self, frame, epoch_num, total_time):
        self.calls.append((frame, epoch_num))


def test_a_script_trains_saves_where_it_looks_restores_and_plays(tmp_path, points, capsys):
    observer = Watching()
    config = settings(tmp_path, config__max_epochs=4, config__save_frequency=2)
    runner = Runner(observer)
    runner.load(config)
    runner.reset()
    best, epochs = runner.run({"train": True, "play": False, "checkpoint": None})
    files = sorted(path.name for path in (tmp_path / "exp" / "nn").iterdir())
    assert epochs == 4 and "small.pth" in files and any(name.startswith("last_small_ep_4_rew_") for name in files)
    tags = scalars(tmp_path / "exp" / "summaries")
    assert {"rewards/step", "rewards/iter", "rewards/time", "episode_lengths/step", "losses/a_loss"} <= set(tags)
    assert {"losses/c_loss", "losses/bounds_loss", "info/last_lr", "info/kl"} <= set(tags)
    assert len(tags["info/epochs"]) == 4
    assert observer.calls[:2] == [("before_init", "exp"), "after_init"] and observer.calls.count("after_steps") == 4
    assert observer.infos == 4 * 16 and (4 * 16 * N, 4) in observer.calls
    assert (
        observer.algo.epoch_num == 4 and observer.algo.frame == 4 * 16 * N and observer.algo.get_param("gamma") == 0.98
    )
    assert points[0].told == [0, 128, 256, 384]
    file = str(tmp_path / "exp" / "nn" / "small.pth")
    assert read_pickled(file)["epoch"] in (1, 2, 3, 4) and best == read_pickled(file)["last_mean_rewards"]
    again = Runner()
    again.load(config)
    assert isinstance(again.run({"train": False, "play": True, "checkpoint": file, "sigma": -1.0}), float)
    assert "av reward" in capsys.readouterr().out
    again.load(settings(tmp_path, config__max_epochs=6))
    again.run({"train": True, "checkpoint": file})
    assert again.agent.epoch_num == 6 and again.agent.frame == 6 * 16 * N, "those of the file count, as in rl_games"


@pytest.mark.parametrize("options", [{"tensors": False}, {"agents": 2}, {"states": True}])
def test_environments_of_each_form(options, tmp_path):
    runner = Runner()
    runner.load(settings(tmp_path, config__env_config=options, config__max_epochs=1, config__minibatch_size=16))
    runner.run({"train": True})
    spec = runner.agent.vec_env.spec
    assert spec.num_envs == N * options.get("agents", 1) and set(spec.obs) == {"policy"}, "states are a central value's"


def test_masks_and_discrete_actions(tmp_path):
    changes = {"algo__name": "a2c_discrete", "model__name": "discrete_a2c", "network__space": {"discrete": None}}
    changes |= {"config__env_config": {"discrete": True, "tensors": False}, "config__use_action_masks": True}
    runner = Runner()
    runner.load(settings(tmp_path, config__max_epochs=2, **changes))
    runner.run({"train": True})
    assert ACTION_MASK in runner.agent.vec_env.spec.obs
    player = runner.create_player()
    player.get_batch_size(torch.zeros(4, OBS), 1)
    action = player.get_masked_action(torch.randn(4, OBS), np.array([[False, True, False]] * 4), is_deterministic=True)
    assert action.tolist() == [1, 1, 1, 1]
    assert isinstance(player.run(), float)


def test_actions_are_stretched_to_the_bounds_or_left_alone(tmp_path):
    for clip, bound in ((True, 2.0), (False, float("inf"))):
        env = RlGamesEnv(VecEnv(), None, N, "cpu", clip_actions=clip, masks=False)
        assert env.spec.action.high == (bound,)
    space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(3)])
    env = VecEnv()
    given = {"action_space": space, "observation_space": None}
    assert RlGamesEnv(env, given, N, "cpu", clip_actions=True, masks=False).spec.action == MultiDiscrete((2, 3))


def test_states_of_a_player_may_be_zeroed_in_place(tmp_path):
    rnn = {"name": "lstm", "units": 6, "layers": 2, "before_mlp": True}
    runner = Runner()
    runner.load(settings(tmp_path, network__rnn=rnn, config__seq_length=4))
    player = runner.create_player()
    obs = player.obs_to_torch({"obs": torch.randn(4, OBS)})
    assert player.is_rnn and player.get_batch_size(obs, 1) == 4
    player.init_rnn()
    assert [tuple(state.shape) for state in player.states] == [(2, 4, 6), (2, 4, 6)]
    first = player.get_action(obs, is_deterministic=True)
    second = player.get_action(obs, is_deterministic=True)
    assert not torch.equal(first, second), "it remembers"
    for state in player.states:
        state[:, [0, 2], :] = 0.0
    third = player.get_action(obs, is_deterministic=True)
    torch.testing.assert_close(third[[0, 2]], first[[0, 2]])
    assert not torch.allclose(third[1], first[1])
    player.reset()
    torch.testing.assert_close(player.get_action(obs, is_deterministic=True), first)
    player.run()
    assert player.states[0].shape == (2, N, 6)


def test_one_observation_without_a_batch_dimension():
    runner = Runner()
    runner.load(rl_games(config__device="cpu"))
    player = runner.create_player()
    assert player.get_action(torch.randn(OBS), is_deterministic=True).shape == (1,)


def test_players_and_agents_of_the_users(tmp_path):
    class Mine(PpoPlayer):
        def run(self):
            return "mine"

    asked = []

    class Still(PpoPlayer):
        def get_action(self, obs, is_deterministic=False):
            asked.append(is_deterministic)
            return torch.zeros_like(super().get_action(obs, is_deterministic))

    runner = Runner()
    runner.player_factory.register_builder("a2c_continuous", lambda **arguments: Mine(**arguments))
    runner.load(settings(tmp_path))
    assert runner.run({"play": True}) == "mine"
    runner.player_factory.register_builder("a2c_continuous", lambda **arguments: Still(**arguments))
    player = runner.create_player()
    obs = player.env_reset(player.env)
    assert player.get_batch_size(obs, 1) == N
    after, reward, done, infos = player.env_step(player.env, player.get_action(obs))
    assert torch.equal(after, obs) and torch.equal(reward, -obs[:, 0].abs()) and not done.any() and infos == {}
    player.games_num, player.max_steps = 4, 1
    player.run()
    assert asked == [False, *[True] * 4], "once above, and then for as many steps as four games may take"
    with pytest.raises(ConfigError, match=r"calc_gradients: canter\.Extension\.loss"):

        class Changed(Agent):
            def calc_gradients(self, batch):
                pass

    class A2CAgent:
        def __init__(self, **arguments):
            pass

        def train_epoch(self):
            pass

        def play_steps(self):
            pass

    runner.algo_factory.register_builder("amp", lambda **arguments: A2CAgent(**arguments))
    runner.load(settings(tmp_path, algo__name="amp"))
    with pytest.raises(ConfigError, match=r"train_epoch: .*phases.*play_steps: .*reward"):
        runner.run({"train": True})


def test_a_subclass_of_rl_games_agent_is_refused_before_it_builds_anything(tmp_path, monkeypatch):
    class A2CBase:
        def __init__(self, base_name, params):
            raise AssertionError("it was built")

        def train_epoch(self):
            pass

    A2CBase.__module__ = "rl_games.common.a2c_common"  # a FAKE of the parent's

    class Mine(A2CBase):
        def calc_gradients(self, batch):
            pass

    built = A2CBase.__init__
    monkeypatch.setitem(sys.modules, "rl_games.common.a2c_common", SimpleNamespace(A2CBase=A2CBase))
    for agent, words in ((Mine, r"Use calc_gradients: canter\.Extension\.loss[^;]*$"), (A2CBase, "registration")):
        runner = Runner()
        runner.algo_factory.register_builder("a2c_continuous", lambda agent=agent, **arguments: agent(**arguments))
        runner.load(settings(tmp_path))
        with pytest.raises(ConfigError, match=words):
            runner.run({"train": True})
    assert A2CBase.__init__ is built


def test_sac_trains_saves_restores_and_plays(tmp_path, monkeypatch):
    own = {"train_dir": str(tmp_path), "full_experiment_name": "exp", "device": "cpu", "env_name": "points"}
    own |= {"save_best_after": 1, "player": {"games_num": 4}, "env_config": {}, "max_epochs": 20}
    config = sac(**own)
    runner = Runner()
    runner.load(config)
    runner.run({"train": True})
    file = tmp_path / "exp" / "nn" / "pendulum.pth"
    assert file.is_file() and runner.agent.algorithm.updates > 0
    player = runner.create_player()
    player.restore(str(file.with_suffix("")))
    trained, obs, begun = runner.agent.algorithm, torch.randn(4, OBS), read_pickled(file)["epoch"]
    again = Runner()
    again.load(sac(**own | {"max_epochs": begun + 20}))
    again.run({"train": True, "checkpoint": str(file)})
    assert again.agent.epoch_num == begun + 20
    last = next(file.parent.glob(f"last_pendulum_ep_{runner.agent.epoch_num}_*.pth"))
    player.restore(str(last))
    wanted, _ = trained.policy.act({"policy": obs}, deterministic=True)
    torch.testing.assert_close(player.get_action(obs, is_deterministic=True), wanted)
    assert isinstance(runner.run({"play": True, "checkpoint": str(file)}), float)
    run = tmp_path / "run"  # a pendulum has as many observations and actions
    assert import_run(last, import_config(sac(), parity=True).config, run) == runner.agent.epoch_num
    torch.testing.assert_close(torch.from_numpy(canter.load(run).predict(obs.numpy())[0]), wanted)
    monkeypatch.setattr(scores, "EVAL_EPISODES", 2)
    main(["resume", str(run), "--console", "lines"])
    torch.save({"actor": {}, "critic": {}, "epoch": 1}, tmp_path / "theirs.pth")
    with pytest.raises(CheckpointRefused, match="no file of rl_games' SAC: it has actor, critic, epoch"):
        player.restore(str(tmp_path / "theirs.pth"))


class Styled(VecEnv):
    """The same points, which show a frame to compare with clips."""

    def _obs(self):
        obs = super()._obs()
        return {"obs": obs, "amp": obs[:, :2].clone()}


class IsaacGymTask(VecEnv):
    """Points as a task of IsaacGymEnvs for AMP: frames of two numbers, the newest first, and resets on request."""

    def __init__(self, num_actors):
        super().__init__(num_actors)
        self.fetched = 0

    def get_env_info(self):
        return super().get_env_info() | {"amp_observation_space": gymnasium.spaces.Box(-9, 9, (4,))}

    def fetch_amp_obs_demo(self, count):
        assert count == 16, "the task keeps one buffer, of the size of its first call"
        self.fetched += 1
        return torch.full((count, 4), float(self.fetched))

    def reset(self):
        super().reset()
        self.ended = np.ones(self.rows, bool)
        return {"obs": torch.zeros(self.rows, OBS)}

    def step(self, action):
        before = self.place[:, :2].copy()
        self.place[:, 0] += 0.3 * np.asarray(action)[:, 0]
        self.age += 1
        fallen = np.abs(self.place[:, 0]) > 2
        self.ended = fallen | (self.age >= 10)
        shown = torch.from_numpy(np.hstack([self.place[:, :2], before]).astype(np.float32))
        infos = {"amp_obs": shown, "terminate": torch.from_numpy(fallen).long()}
        reward = torch.from_numpy(-np.abs(self.place[:, 0]).astype(np.float32))
        return {"obs": self._obs()}, reward, torch.from_numpy(self.ended).long(), infos

    def reset_done(self):
        (done,) = np.nonzero(self.ended)
        self.place[done], self.age[done] = self.random.randn(len(done), OBS), 0
        return {"obs": self._obs()}, torch.from_numpy(done)


class IsaacGymVecEnv:
    """The wrapper of IsaacGymEnvs' script around a task."""

    def __init__(self, num_actors):
        self.env = IsaacGymTask(num_actors)
        self.step, self.reset, self.get_env_info = self.env.step, self.env.reset, self.env.get_env_info


def test_isaac_gym_envs_own_amp_agent_becomes_the_extension_and_its_task_gives_the_clips(tmp_path, monkeypatch):
    class A2CBase:
        def __init__(self, base_name, params):
            raise AssertionError("it was built")

    class AMPAgent(A2CBase):
        def calc_gradients(self, batch):
            raise AssertionError("it trains")

    A2CBase.__module__, AMPAgent.__module__ = "rl_games.common.a2c_common", "isaacgymenvs.learning.amp_continuous"
    monkeypatch.setitem(sys.modules, "rl_games.common.a2c_common", SimpleNamespace(A2CBase=A2CBase))
    tasks = []

    def create(name, num_actors, **options):
        made = IsaacGymVecEnv(num_actors)
        tasks.append(made.env)
        return made

    vecenv.register("ISAAC_GYM", create)
    env_configurations.register("humanoid", {"vecenv_type": "ISAAC_GYM", "env_creator": None})
    changes = {"config__env_name": "humanoid", "config__max_epochs": 2, "config__value_bootstrap": False}
    changes |= AMP | {"config__amp_batch_size": 16, "config__amp_obs_demo_buffer_size": 64}
    runner = Runner()
    runner.algo_factory.register_builder("amp_continuous", lambda **arguments: AMPAgent(**arguments))
    runner.load(settings(tmp_path, **changes))
    runner.run({"train": True})
    ppo, env = runner.agent.algorithm, runner.agent.vec_env
    amp = discriminator_of(ppo)
    assert type(runner.agent).__name__ == "AmpAgent" and ppo.config.bootstrap_truncated
    assert tasks[0].fetched > 4 and set(amp.demonstrations(500)[:, 0].tolist()) == set(env.kept[:, 0].tolist())
    file = next((tmp_path / "exp" / "nn").glob("last_small_ep_2_*.pth"))
    assert torch.equal(read_pickled(file)["model"]["a2c_network._disc_mlp.0.weight"], amp.trunk[0].weight)
    assert isinstance(runner.run({"play": True, "checkpoint": str(file)}), float)


def test_a_task_of_isaac_gym_envs_shows_the_true_last_observation_and_transition():
    made = IsaacGymVecEnv(4)
    task = made.env
    env = AmpEnv(made, None, 4, "cpu", clip_actions=True, masks=False, states=False, batch=16, buffer=64)
    first = env.reset()
    assert not first["amp"].any() and first["policy"].any()
    truncated = 0
    for _ in range(20):
        before = torch.from_numpy(task.place.copy()).float()
        step = env.step(torch.ones(4, 1))
        newest = before[:, :2] + torch.tensor([0.3, 0.0])
        torch.testing.assert_close(step.final_obs["amp"], torch.cat([newest, before[:, :2]], -1))
        torch.testing.assert_close(step.final_obs["policy"][:, :2], newest)
        ended = step.terminated | step.truncated
        assert torch.equal(step.terminated, newest[:, 0].abs() > 2)
        assert torch.equal(ended, (step.obs["policy"] != step.final_obs["policy"]).any(-1)), "these begin again"
        truncated += int(step.truncated.sum())
    assert truncated > 0


CLIPS = {"motions": ["canter:swimmer_wide.npz"], "columns": ["dof_positions/joint_1", "dof_positions/joint_2"]}


def test_amp_trains_saves_its_discriminator_restores_and_plays(tmp_path):
    vecenv.register("STYLED", lambda name, num_actors, **options: Styled(num_actors))
    env_configurations.register("styled", {"vecenv_type": "STYLED", "env_creator": None})
    model_builder.register_network("amp", object)  # as IsaacGymEnvs' script does
    changes = AMP | {"config__amp": CLIPS | {"time_step": 0.02}, "config__max_epochs": 2}
    runner = Runner()
    runner.load(settings(tmp_path, **changes, config__env_name="styled"))
    runner.run({"train": True})
    trained = discriminator_of(runner.agent.algorithm)
    assert trained.told[0] > 0, "there is a reward for style"
    file = next((tmp_path / "exp" / "nn").glob("last_small_ep_2_*.pth"))
    tree, width = read_pickled(file), trained.trunk[0].weight.shape[1]
    first = tree["model"]["a2c_network._disc_mlp.0.weight"]
    newest = [2, 3, 0, 1]  # two frames of two components; the parent has the newest first
    assert width == 4 and torch.equal(first, trained.trunk[0].weight[:, newest])
    assert torch.equal(tree["amp_input_mean_std"]["running_mean"], trained.normalizer.mean[newest])
    assert len(tree["optimizer"]["param_groups"][0]["params"]) == len(tree["model"]) - 6, "all but the statistics"
    again = runner.algo_factory.create("amp_continuous", base_name="run", params=runner.params)
    again.restore(str(file))
    other, rows = discriminator_of(again.algorithm), torch.randn(5, 4)
    torch.testing.assert_close(other.style_reward(rows), trained.style_reward(rows))
    mine, theirs = (each.phase.optimizer.groups["discriminator"].state() for each in (trained, other))
    for name in ("step", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(theirs[name], mine[name])
    assert isinstance(runner.run({"play": True, "checkpoint": str(file)}), float)
    runner.load(settings(tmp_path, **changes))
    with pytest.raises(ConfigError, match=r"no observation group 'amp'.*config\.amp\.motions.*fetch_amp_obs_demo"):
        runner.run({"train": True})


def test_missing_parts_are_named(tmp_path):
    runner = Runner()
    runner.load(settings(tmp_path, algo__name="a2c_continous"))
    with pytest.raises(ConfigError, match="did you mean a2c_continuous"):
        runner.run({"train": True})
    runner.load(settings(tmp_path, config__env_name="nowhere"))
    with pytest.raises(ConfigError, match=r"env_name='nowhere'.*vecenv.register"):
        runner.run({"train": True})
    model_builder.register_network("my_net", object)
    runner.load(settings(tmp_path, network__name="my_net"))
    with pytest.raises(ConfigError, match=r"canter\.register\('network', 'my_net'\)"):
        runner.run({"train": True})


def test_weights_go_from_agent_to_agent(tmp_path):
    runner = Runner()
    runner.load(settings(tmp_path, config__max_epochs=1))
    runner.run({"train": True})
    other = runner.algo_factory.create("a2c_continuous", base_name="run", params=runner.params)
    other.set_full_state_weights(runner.agent.get_full_state_weights())
    obs = {"policy": torch.randn(3, OBS)}
    assert other.epoch_num == 1 and other.train_dir == str(tmp_path)
    assert torch.equal(other.algorithm.policy.act(obs)[0], runner.agent.algorithm.policy.act(obs)[0])


def test_the_central_value_alone_comes_from_a_file(tmp_path):
    network = {"name": "actor_critic", "central_value": True}
    network["mlp"] = {"units": [8], "activation": "elu", "initializer": {"name": "default"}}
    central = {"minibatch_size": 32, "mini_epochs": 1, "learning_rate": 1e-3, "clip_value": True}
    central |= {"normalize_input": True, "network": network}
    changes = {"config__env_config": {"states": True}, "config__central_value_config": central}
    runner = Runner()
    runner.load(settings(tmp_path, **changes, config__max_epochs=2))
    runner.run({"train": True})
    file = next((tmp_path / "exp" / "nn").glob("last_*.pth"))
    runner.load(settings(tmp_path, **changes, seed=9))
    made = runner.algo_factory.create("a2c_continuous", base_name="run", params=runner.params)
    runner._prepare(made, {"train": True, "checkpoint": str(file), "load_critic_only": True})
    taken, own = made.algorithm.model, runner.agent.algorithm.model
    assert torch.equal(taken.critic.head.linear.weight, own.critic.head.linear.weight)
    assert not torch.equal(taken.actor.head.mean.weight, own.actor.head.mean.weight) and made.epoch_num == 0
    runner.load(settings(tmp_path))
    with pytest.raises(ConfigError, match="load_critic_only=True: the settings have no central_value_config"):
        runner.run({"train": True, "checkpoint": str(file), "load_critic_only": True})


def test_the_settings_of_the_caller_are_left_alone(tmp_path):
    config = settings(tmp_path)
    before = repr(config)
    Runner().load(config)
    assert repr(config) == before
