"""The fingerprint of an environment's source, and the halls of fame that it separates."""

import sys

import pytest

import canter
from canter.envs import EnvConfig
from canter.envs.imports import allow_import
from canter.envs.source import source_fingerprint
from canter.runs.hall_of_fame import problem_of

SOURCE = """
import gymnasium
from hall_rewards import REWARD

class Flip(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), REWARD, True, False, {}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def to(source=SOURCE, reward="1.0"):
        (tmp_path / "hall_env.py").write_text(source)
        (tmp_path / "hall_rewards.py").write_text(f"REWARD = {reward}\n")
        for name in ("hall_env", "hall_rewards"):
            sys.modules.pop(name, None)
        sys.path_importer_cache.clear()
        sys.dont_write_bytecode = True
        allow_import("hall_env", str(tmp_path))
        return "hall_env:Flip"

    return to


def test_the_source_counts_and_its_comments_do_not(write):
    first = source_fingerprint(write())
    assert first is not None
    program = "# a remark\nif __name__ == '__main__':\n    print('trains')\n"
    assert source_fingerprint(write(SOURCE.replace("True, False", "True,  False") + program)) == first
    assert source_fingerprint(write(SOURCE.replace("True, False", "False, True"))) != first


@pytest.mark.parametrize("env_id", ["CartPole-v1", "tensor:cartpole"])
def test_environments_of_libraries_have_a_fingerprint(env_id):
    assert source_fingerprint(env_id) == problem_of(EnvConfig(id=env_id))["source"] is not None
    assert source_fingerprint("nowhere:Nothing") is None


def test_changed_source_begins_another_hall_and_says_so(write, tmp_path, capsys):
    settings = {"total_steps": 64, "console": "lines", "run_dir": tmp_path / "runs", "num_envs": 2}
    algorithm = {"horizon": 16, "epochs": 1, "num_minibatches": 1}
    texts = []
    for reward in ("1.0", "1.0", "2.0"):
        source = SOURCE.replace("from hall_rewards import REWARD", f"REWARD = {reward}")
        canter.train(write(source), algorithm=algorithm, **settings)
        texts.append(capsys.readouterr().out)
    assert "First result on hall_env:Flip: 1.0\n" in texts[0]
    assert "As good as the best" in texts[1]
    assert "First result on hall_env:Flip: 2.0 since its source changed" in texts[2]
