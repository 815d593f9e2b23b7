"""A student with their own environment: one file and one command, then Python."""

import re

THERMOSTAT = '''
import gymnasium
import numpy as np
from gymnasium import spaces


class Thermostat(gymnasium.Env):
    """Heat a room, or do not, so that it stays at 20 degrees while it cools."""

    observation_space = spaces.Box(-20.0, 20.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.error = self.np_random.uniform(-5.0, 5.0)
        return np.array([self.error], np.float32), {}

    def step(self, action):
        self.error += (1.0 if action == 1 else 0.0) - 0.4
        return np.array([self.error], np.float32), -abs(self.error), abs(self.error) > 15.0, False, {}

    def render(self):
        return np.full((32, 32, 3), 128 + int(6 * self.error), np.uint8)
'''

THREE_LINES = """
import canter
from thermostat import Thermostat

result = canter.train(Thermostat, env={"reset_steps": 40}, algorithm={"gamma": 0.9}, total_steps=4096, console="quiet")
print("score", result.score.mean, "cold:", result.predict([-3.0])[0], "warm:", result.predict([3.0])[0])
"""

MINE = ("thermostat:Thermostat", "--env.reset-steps", "40", "--algorithm.gamma", "0.9")


def test_from_one_file_to_a_policy_that_is_watched_measured_and_exported(user):
    user.writes("thermostat.py", THERMOSTAT)
    code, told = user.tries("train", *MINE)
    assert code == 2 and "--allow-import thermostat" in told
    assert "time limit" in user.types("check", "thermostat:Thermostat", "--allow-import", "thermostat")
    code, told = user.tries("train", *MINE, "--algorithm.gama", "0.9")
    assert code == 2 and "did you mean --algorithm.gamma" in told

    told = user.runs("-m", "canter", "train", *MINE, "--allow-import", "thermostat", "--total-steps", "6144")
    score, episodes = re.search(r"Final score: mean return (\S+) over (\d+)", told).groups()
    assert float(score) > -100  # doing nothing is at -400 or so
    for line in re.findall(r"^  (\S*canter|\S+ -m canter) (.*?)  ", told.split("What next?")[1], re.MULTILINE):
        assert line[1].split()[0] in ("play", "report", "resume")

    # From here on the run knows where the class is: nobody allows anything again.
    assert "thermostat:Thermostat" in user.types("runs")
    assert f"mean {score}" in user.types("eval", "latest", "--episodes", episodes)
    user.types("play", "latest", "--video", "warm.mp4", "--max-steps", "20")
    assert (user.folder / "warm.mp4").stat().st_size > 0
    assert "the same actions" in user.types("export", "latest", "--output", "warm.pt2")
    user.types("report", "latest")
    assert "8,192 steps" in user.types("resume", "latest", "--total-steps", "8192")


def test_three_lines_of_python(user):
    user.writes("thermostat.py", THERMOSTAT)
    user.writes("learn.py", THREE_LINES)
    told = user.runs("learn.py")
    assert re.fullmatch(r"score -\d+\.\d+ cold: 1 warm: 0\n", told), told
    assert "finished" in user.types("runs")
