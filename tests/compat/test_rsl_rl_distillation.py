"""RSL-RL's runner for students over Canter: a teacher from a file of PPO, and files of students of all generations."""

import pytest
import torch
from test_rsl_rl_runner import OBS, Robots, settings
from torch import nn

from canter.compat.pickled_file import read_pickled
from canter.compat.rsl_rl import DistillationRunner, OnPolicyRunner
from canter.core.plain import ConfigError

LEARNS = {"class_name": "Distillation", "num_learning_epochs": 2, "gradient_length": 4, "learning_rate": 3e-3}
TEACHER = {"class_name": "MLPModel", "hidden_dims": [32, 16], "activation": "elu", "obs_normalization": True}
RUN = {"num_steps_per_env": 8, "save_interval": 50, "seed": 1, "algorithm": LEARNS}
SINCE_4 = RUN | {
    "student": {
        "class_name": "MLPModel",
        "hidden_dims": [24],
        "activation": "elu",
        "obs_normalization": True,
        "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.1, "std_type": "scalar"},
    },
    "teacher": TEACHER | {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.0}},
    "obs_groups": {"student": ["seen"], "teacher": ["policy"]},
}
STUDENT_TEACHER = {
    "class_name": "StudentTeacherRecurrent",
    "init_noise_std": 0.1,
    "student_hidden_dims": [24],
    "teacher_hidden_dims": [32, 16],
    "activation": "elu",
    "rnn_type": "gru",
    "rnn_hidden_dim": 6,
    "rnn_num_layers": 1,
}
BEFORE_4 = RUN | {
    "policy": STUDENT_TEACHER | {"student_obs_normalization": False, "teacher_obs_normalization": True},
    "obs_groups": {"policy": ["seen"], "teacher": ["policy"]},
}


class Seen(Robots):
    """The student sees the same in other units."""

    def get_observations(self):
        return {"policy": self.place.clone(), "seen": 3 * self.place}


@pytest.fixture
def teacher(tmp_path):
    runner = OnPolicyRunner(Seen(), settings(), device="cpu")
    runner.learn(3)
    runner.save(str(tmp_path / "teacher.pt"))
    return runner, str(tmp_path / "teacher.pt")


@pytest.mark.parametrize("config", [SINCE_4, BEFORE_4], ids=["5.x", "3.x, with memory"])
def test_a_student_learns_from_a_file_of_ppo_saves_loads_and_is_exported(config, teacher, tmp_path):
    theirs, file = teacher
    runner = DistillationRunner(Seen(), config, log_dir=str(tmp_path / "logs"), device="cpu")
    with pytest.raises(ConfigError, match="no teacher was loaded"):
        runner.learn(1)
    runner.load(file)
    assert runner.current_learning_iteration == 0, "the iteration was the teacher's"
    obs = {"policy": torch.randn(8, OBS)}
    wanted, _ = runner.trainer.algorithm.teacher.act(obs, ())
    torch.testing.assert_close(wanted, theirs.get_inference_policy()(obs))
    errors = []
    counted = runner.trainer.on_iteration
    runner.trainer.on_iteration = lambda report: (counted(report), errors.append(report.metrics["policy/action_error"]))
    runner.learn(20, init_at_random_ep_len=True)
    assert errors[-1] < 0.6 * errors[0]
    saved = tmp_path / "logs" / "model_19.pt"
    tree = read_pickled(saved)
    assert {"student_state_dict", "teacher_state_dict", "optimizer_state_dict", "iter", "infos"} == set(tree)
    again = DistillationRunner(Seen(), config, device="cpu")
    again.load(str(saved))
    seen = {"seen": torch.randn(8, OBS), "policy": torch.randn(8, OBS)}
    torch.testing.assert_close(again.get_inference_policy()(seen), runner.get_inference_policy()(seen))
    assert again.current_learning_iteration == 19 and again.alg.teacher_loaded
    assert again.alg._group.adam.step == runner.alg._group.adam.step > 0
    torch.testing.assert_close(again.alg._group.adam.exp_avg, runner.alg._group.adam.exp_avg)
    runner.export_policy_to_jit(str(tmp_path))
    exported = torch.jit.load(tmp_path / "policy.pt")
    runner.alg.policy.reset()
    seen = {name: group[:1] for name, group in seen.items()}
    torch.testing.assert_close(exported(seen["seen"]), runner.alg.policy(seen), atol=1e-5, rtol=0)


def test_a_students_file_of_3x_is_read(tmp_path):
    torch.manual_seed(0)
    memory, student = nn.GRU(OBS, 6), nn.Sequential(nn.Linear(6, 24), nn.ELU(), nn.Linear(24, 2))
    taught = nn.Sequential(nn.Linear(OBS, 32), nn.ELU(), nn.Linear(32, 16), nn.ELU(), nn.Linear(16, 2))
    mean, var = torch.randn(1, OBS), torch.rand(1, OBS) + 0.5
    stats = {"_mean": mean, "_var": var, "_std": var.sqrt(), "count": torch.tensor(90)}
    model = {"std": torch.tensor([0.1, 0.2])} | {f"student.{n}": t for n, t in student.state_dict().items()}
    model |= {f"teacher.{n}": t for n, t in taught.state_dict().items()}
    model |= {f"memory_s.rnn.{n}": t for n, t in memory.state_dict().items()}
    model |= {f"teacher_obs_normalizer.{n}": t for n, t in stats.items()}
    torch.save({"model_state_dict": model, "optimizer_state_dict": {}, "iter": 7, "infos": None}, tmp_path / "m.pt")
    runner = DistillationRunner(Seen(), BEFORE_4, device="cpu")
    runner.load(str(tmp_path / "m.pt"))
    assert runner.current_learning_iteration == 7
    seen = {"seen": torch.randn(4, OBS), "policy": torch.randn(4, OBS)}
    expected = student(memory(seen["seen"].unsqueeze(0))[0].squeeze(0)).detach()
    torch.testing.assert_close(runner.get_inference_policy()(seen), expected, atol=1e-6, rtol=0)
    wanted, _ = runner.trainer.algorithm.teacher.act(seen, ())
    torch.testing.assert_close(
        wanted, taught((seen["policy"] - mean) / (var.sqrt() + 0.01)).detach(), atol=1e-6, rtol=0
    )
