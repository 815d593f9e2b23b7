"""RSL-RL's runner over Canter: what scripts, subclasses and other generations of environments do with it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from theirs import GENERATIONS, changed

from canter.app.cli import main
from canter.compat.pickled_file import read_pickled
from canter.compat.rsl_rl import OnPolicyRunner, RslRlEnv
from canter.config.files import dump_plain
from canter.core.plain import ConfigError

OBS = 4


class Robots:
    """Points that are paid for standing at the origin, in the form of each generation of RSL-RL."""

    num_envs, num_actions, max_episode_length, device, cfg = 8, 2, 20, "cpu", {}

    def __init__(self, generation=5):
        self.generation, self.unwrapped = generation, self
        self.random = torch.Generator().manual_seed(0)
        self.place = torch.randn(8, OBS, generator=self.random)
        self.episode_length_buf = torch.zeros(8, dtype=torch.long)
        if generation == 1:
            self.get_privileged_observations = lambda: None

    def get_observations(self):
        if self.generation == 1:
            return self.place.clone()
        if self.generation == 2:
            return self.place.clone(), {"observations": {"critic": self.place.clone()}}
        return {"policy": self.place.clone()}

    def step(self, action):
        self.place[:, :2] += 0.3 * action.clamp(-1, 1)
        reward = -self.place[:, :2].square().sum(-1)
        self.episode_length_buf += 1
        cut = self.episode_length_buf >= self.max_episode_length
        fallen = self.place[:, :2].abs().amax(-1) > 4
        done = cut | fallen
        self.place[done] = torch.randn(int(done.sum()), OBS, generator=self.random)
        self.episode_length_buf[done] = 0
        extras = {"time_outs": cut, "log": {"reward/distance": reward.mean(), "count": 3, "text": "ignored"}}
        obs = self.get_observations()
        if self.generation == 1:
            return obs, None, reward, done.long(), extras
        if self.generation == 2:
            return obs[0], reward, done.long(), extras | obs[1]
        return obs, reward, done.long(), extras


def settings(generation=5, **changes):
    tree = changed(GENERATIONS[generation], {"critic.activation": "elu"} if generation == 5 else {})
    return changed(tree, changes)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_script_of_each_generation_trains_saves_loads_and_plays(generation, tmp_path):
    env = Robots(generation)
    section = "runner__save_interval" if generation == 1 else "save_interval"
    config = settings(generation, **{section: 2})
    runner = OnPolicyRunner(env, config, log_dir=str(tmp_path), device="cpu")
    runner.learn(num_learning_iterations=4, init_at_random_ep_len=True)
    assert runner.current_learning_iteration == 3
    names = {path.name for path in tmp_path.glob("model_*.pt")}
    assert names == {"model_0.pt", "model_2.pt", "model_3.pt"}, "where scripts look for them"
    again = OnPolicyRunner(Robots(generation), config, log_dir=None, device="cpu")
    again.load(str(tmp_path / "model_3.pt"))
    assert again.current_learning_iteration == 3
    obs = Robots(generation).place
    torch.testing.assert_close(again.get_inference_policy()(obs), runner.get_inference_policy("cpu")(obs))
    assert runner.get_inference_policy("meta")(obs).device.type == "meta", "where it is wanted"
    again.learn(2)
    assert again.current_learning_iteration == 4, "the iteration of the file is run once more, as in RSL-RL"


def test_it_learns(tmp_path):
    env = Robots()
    runner = OnPolicyRunner(env, settings(num_steps_per_env=24), device="cpu")
    returns = []
    runner.trainer.on_iteration = lambda report: returns.append(report.rollout_reward)
    runner.learn(40)
    assert sum(returns[-5:]) / 5 > 0.5 * sum(returns[:5]) / 5, "rewards are negative: half of the cost is gone"


def test_time_outs_metrics_and_unknown_last_observations():
    env = RslRlEnv(Robots())
    assert env.spec.final_obs == "unknown" and not env.spec.action.bounded
    env.env.episode_length_buf[0], env.env.place[1] = 19, 100.0
    step = env.step(torch.zeros(8, 2))
    assert (step.truncated[0], step.terminated[0], step.truncated[1], step.terminated[1]) == (True, False, False, True)
    assert step.metrics["reward/distance"].dim() == 0 and step.metrics["count"] == 3 and "text" not in step.metrics


class Seeing(Robots):
    """The same points, with an image before the numbers."""

    def get_observations(self):
        return {"camera": self.place.view(8, 1, 1, OBS).expand(8, 1, OBS, OBS), "policy": self.place.clone()}


def test_images_come_behind_vectors_as_rsl_rl_joins_them():
    cnn = {"output_channels": [2], "kernel_size": [3], "stride": 1}
    groups = {"actor": ["camera", "policy"], "critic": ["camera", "policy"]}
    config = settings(obs_groups=groups, actor__cnn_cfg=cnn, critic__cnn_cfg=cnn)
    runner = OnPolicyRunner(Seeing(), config, device="cpu")
    ppo = runner.alg.ppo
    assert ppo.model.actor.network.groups == ppo.model.critic.network.groups == ("policy", "camera")
    runner.alg.save()


def test_parts_of_a_file_and_signatures_of_all_generations(tmp_path):
    runner = OnPolicyRunner(Robots(), settings(), device="cpu")
    runner.learn(2)
    runner.save(str(tmp_path / "a.pt"), infos={"curriculum": 3})
    other = OnPolicyRunner(Robots(), settings(seed=9), device="cpu")
    before = {name: p.clone() for name, p in other.alg.critic.named_parameters()}
    infos = other.load(str(tmp_path / "a.pt"), load_cfg={"actor": True}, strict=True, map_location="cpu")
    assert infos == {"curriculum": 3} and other.current_learning_iteration == 0
    assert all(torch.equal(p, before[name]) for name, p in other.alg.critic.named_parameters())
    assert torch.equal(other.alg.actor.network.head.mean.weight, runner.alg.actor.network.head.mean.weight)
    other.load(str(tmp_path / "a.pt"), False)
    assert other.current_learning_iteration == 1 and other.alg.learning_rate == pytest.approx(1e-3)
    other.load(str(tmp_path / "a.pt"), load_optimizer=True)
    assert other.alg.learning_rate == pytest.approx(runner.alg.learning_rate)
    saved = other.alg.save()
    assert set(saved) == {"actor_state_dict", "critic_state_dict", "optimizer_state_dict"}
    assert other.alg.load(saved, None, True) is True
    assert read_pickled(tmp_path / "a.pt")["iter"] == 1


def test_what_subclasses_of_mjlab_touch(tmp_path):
    class Mine(OnPolicyRunner):
        saved = 0

        def save(self, path, infos=None):
            self.saved += 1
            torch.save({**self.alg.save(), "iter": self.current_learning_iteration, "infos": {"step": 5}}, path)

    runner = Mine(Robots(), settings(), log_dir=str(tmp_path), device="cpu")
    runner.add_git_repo_to_log(__file__)
    assert runner.logger.git_status_repos == [__file__] and runner.alg.rnd is None
    assert not list(tmp_path.iterdir()), "who only loads writes nothing"
    runner.learn(2)
    assert runner.saved == 3 and runner.logger.log_dir == str(tmp_path)
    assert runner.alg.get_policy().output_std.shape == (2,)
    assert runner.logger_type == "tensorboard" and runner.alg.policy.actor_obs_normalization
    assert not hasattr(runner.alg.actor_critic, "memory_a"), "legged_gym asks so whether the policy is recurrent"
    obs = torch.randn(3, OBS)
    exported = runner.alg.actor_critic.actor(runner.alg.policy.actor_obs_normalizer(obs))
    torch.testing.assert_close(exported, runner.get_inference_policy()(obs), atol=1e-6, rtol=0)


@pytest.mark.parametrize("recurrent", [False, True])
def test_actor_and_critic_are_called_with_observations(recurrent):
    memory = {"class_name": "RNNModel", "rnn_type": "gru", "rnn_hidden_dim": 4, "rnn_num_layers": 1}
    own = (
        {f"{part}__{key}": value for part in ("actor", "critic") for key, value in memory.items()} if recurrent else {}
    )
    runner = OnPolicyRunner(Robots(), settings(**own), device="cpu")
    runner.learn(1)
    actor, critic, ppo = runner.alg.actor, runner.alg.critic, runner.alg.ppo
    obs = runner.env.get_observations()
    groups = runner.adapter.groups(obs)
    actor.reset()
    first, value = actor(obs), critic(obs)
    assert value.shape == (len(first), 1) and actor.is_recurrent == critic.is_recurrent == recurrent
    torch.testing.assert_close(
        first, ppo.policy.act(groups, ppo.policy.initial_state(len(first)), deterministic=True)[0]
    )
    torch.testing.assert_close(value[:, 0], ppo.critic.value(groups, ppo.critic.initial_state(len(first)))[0])
    assert torch.equal(critic(obs), value) != recurrent, "the state is kept between calls"
    critic.reset()
    assert torch.equal(critic(obs), value)
    assert not torch.equal(actor(obs, stochastic_output=True), first)


def scalars(folder):
    """All scalars in the event files of a folder, by their tags."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [event.value for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_the_event_file_has_rsl_rls_tags_and_code_is_kept(tmp_path):
    repository = tmp_path / "project"
    repository.mkdir()
    (repository / "train.py").write_text("first\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(repository), *words], check=True)
    (repository / "train.py").write_text("second\n")
    runner = OnPolicyRunner(Robots(), settings(), log_dir=str(tmp_path / "logs"), device="cpu")
    runner.add_git_repo_to_log(str(repository / "train.py"))
    reports = []
    count, runner.trainer.on_iteration = runner.trainer.on_iteration, lambda r: (reports.append(r), count(r))
    runner.learn(3)
    found = scalars(tmp_path / "logs")
    tags = {
        "Loss/value",
        "Loss/surrogate",
        "Loss/entropy",
        "Loss/learning_rate",
        "Policy/mean_std",
        "Train/mean_reward",
    }
    assert tags | {"Perf/total_fps", "reward/distance", "Episode/count"} <= set(found)
    expected = [2 * report.metrics["loss/value"] for report in reports]
    assert found["Loss/value"] == pytest.approx(expected), "RSL-RL's is the whole square"
    kept = (tmp_path / "logs" / "git" / "project.diff").read_text()
    assert "--- git commit ---" in kept and "-first\n+second" in kept


@pytest.mark.parametrize("memory", [None, "lstm", "gru"])
def test_exported_policies_act_alike(memory, tmp_path):
    rnn = {"class_name": "RNNModel", "rnn_type": memory, "rnn_hidden_dim": 6, "rnn_num_layers": 2} if memory else {}
    runner = OnPolicyRunner(Robots(), settings(**{f"actor__{key}": value for key, value in rnn.items()}), device="cpu")
    runner.learn(2)
    runner.export_policy_to_jit(str(tmp_path))
    exported, policy = torch.jit.load(tmp_path / "policy.pt"), runner.get_inference_policy()
    exported.reset()
    for _ in range(3):
        obs = torch.randn(1, OBS)
        torch.testing.assert_close(exported(obs), policy({"policy": obs}), atol=1e-5, rtol=0)
    policy.reset(torch.ones(1))
    exported.reset()
    torch.testing.assert_close(exported(obs), policy({"policy": obs}), atol=1e-5, rtol=0)
    onnx = runner.alg.get_policy().as_onnx()
    assert onnx.input_names == {None: ["obs"], "lstm": ["obs", "h_in", "c_in"], "gru": ["obs", "h_in"]}[memory]
    assert onnx.input_size == OBS and len(onnx.get_dummy_inputs()) == len(onnx.input_names)


def test_onnx_runs_without_canter(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    runner = OnPolicyRunner(Robots(), settings(), device="cpu")
    runner.learn(2)
    runner.export_policy_to_onnx(str(tmp_path))
    session = runtime.InferenceSession(str(tmp_path / "policy.onnx"), providers=["CPUExecutionProvider"])
    obs = torch.randn(1, OBS)
    (actions,) = session.run(["actions"], {"obs": obs.numpy()})
    torch.testing.assert_close(torch.as_tensor(actions), runner.get_inference_policy()(obs), atol=1e-5, rtol=0)


def mirrored(env, obs, actions, obs_type=None):
    """The four images of points in a plane: x and y may change their signs."""
    signs = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])

    def of(x):
        return None if x is None else torch.cat([x * sign.repeat(x.shape[-1] // 2) for sign in signs])

    return ({name: of(group) for name, group in obs.items()} if isinstance(obs, dict) else of(obs)), of(actions)


@pytest.mark.parametrize("generation", [2, 5])
def test_a_function_that_mirrors_is_learned_from(generation):
    section = {"use_data_augmentation": True, "use_mirror_loss": False, "mirror_loss_coeff": 0.0}
    section["data_augmentation_func"] = mirrored if generation == 2 else f"{__name__}:mirrored"
    runner = OnPolicyRunner(Robots(generation), settings(generation, algorithm__symmetry_cfg=section), device="cpu")
    (extension,) = runner.trainer.algorithm.extensions
    assert [image.name for image in extension.each] == ["image 1", "image 2", "image 1 and image 2"]
    obs = torch.randn(3, 5, OBS)
    signs = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    torch.testing.assert_close(extension.each[2].obs({"policy": obs, "critic": obs})["policy"], obs * signs)
    reports = []
    runner.trainer.on_iteration = reports.append
    runner.learn(2)
    assert reports[-1].metrics["policy/asymmetry"] > 0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nowhere.at_all:mirrored", "import nowhere before the runner"),
        ("mirrored", "data_augmentation_func=.mirrored.: expected MODULE:NAME"),
        (lambda env, obs, actions: (obs, torch.cat([actions] * 3)), "3 blocks"),
    ],
)
def test_functions_that_do_not_mirror_are_refused(function, words):
    section = {"use_data_augmentation": True, "data_augmentation_func": function}
    with pytest.raises(ConfigError, match=words):
        OnPolicyRunner(Robots(), settings(algorithm__symmetry_cfg=section), device="cpu")


TAKE_OVER = """
{first}
import canter.compat.rsl_rl.install_shim
from rsl_rl.runners import OnPolicyRunner
from rsl_rl.runners.on_policy_runner import OnPolicyRunner as Defined
assert OnPolicyRunner.__module__ == "canter.compat.rsl_rl.runner", OnPolicyRunner.__module__
assert Defined is OnPolicyRunner
print("taken")
"""
PARENT = "from .on_policy_runner import OnPolicyRunner\nclass DistillationRunner: pass\n"


def run_python(text, folder):
    paths = [str(folder), str(Path(__file__).parents[2] / "src")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{text}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_shim_replaces_rsl_rls_runners_or_stands_in_for_them(tmp_path):
    assert "taken" in run_python(TAKE_OVER.format(first=""), tmp_path).stdout, "without RSL-RL"
    (tmp_path / "rsl_rl" / "runners").mkdir(parents=True)
    (tmp_path / "rsl_rl" / "__init__.py").write_text("")
    (tmp_path / "rsl_rl" / "runners" / "__init__.py").write_text(PARENT)
    (tmp_path / "rsl_rl" / "runners" / "on_policy_runner.py").write_text("class OnPolicyRunner: pass\n")
    (tmp_path / "early.py").write_text("from rsl_rl.runners import OnPolicyRunner\n")
    assert "taken" in run_python(TAKE_OVER.format(first=""), tmp_path).stdout
    late = run_python(TAKE_OVER.format(first="import early"), tmp_path)
    assert "early has imported rsl_rl's OnPolicyRunner already" in late.stderr


def test_a_checkpoint_becomes_a_run_that_continues(tmp_path, capsys):
    config = changed(settings(), {"obs_groups": {}, "actor.obs_normalization": True, "num_steps_per_env": 16})
    (tmp_path / "agent.yaml").write_text(dump_plain(config))
    agent = str(tmp_path / "agent.yaml")
    common = ["--config", agent, "--env", "Pendulum-v1", "--num-envs", "4"]
    from canter.compat import import_config
    from canter.compat.rsl_rl import checkpoint

    imported = import_config(config, parity=True, env="Pendulum-v1", num_envs=4).config
    ppo = imported.algorithm.build(imported.env.build("cpu").spec, 0)
    torch.save(checkpoint.dump(ppo, 30), tmp_path / "model_30.pt")
    run = str(tmp_path / "run")
    main(["import", str(tmp_path / "model_30.pt"), *common, "--output", run])
    assert "Iteration 30" in capsys.readouterr().out
    main(["eval", run, "--episodes", "4"])
    main(["resume", run, "--console", "lines"])
    assert "ended by until.iterations" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "model_30.pt"), "--output", run])
    assert "add --config" in capsys.readouterr().err
