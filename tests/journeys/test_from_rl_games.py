"""Somebody from rl_games: their YAML file, their script and their checkpoint."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "from_rl_games.md"

SCRIPT = """
import yaml
from canter.compat.rl_games import Runner

if __name__ == "__main__":
    runner = Runner()
    runner.load(yaml.safe_load(open("pendulum.yaml")))
    runner.run({"train": True, "play": False})
"""


def test_from_their_file_to_a_run_and_from_their_checkpoint_to_a_deployed_policy(user):
    theirs = re.search(r"```yaml\n# pendulum\.yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    user.writes("pendulum.yaml", theirs.replace("max_epochs: 300", "max_epochs: 2"))

    told = user.types("import", "pendulum.yaml", "--output", "ours.yaml")
    assert "Mapped with a difference" in told
    told = user.types("train", "--config", "pendulum.yaml", "--console", "lines", "--name", "imported")
    assert "ended by until.iterations" in told
    code, told = user.tries("train", "--config", "pendulum.yaml", "--horizon-length", "64")
    assert code == 2 and "--algorithm.horizon" in told

    # One changed import in their script, and the checkpoint is where they look for it.
    user.writes("train.py", SCRIPT)
    user.runs("train.py")
    (checkpoint,) = user.folder.glob("runs/*/nn/last_pendulum_ep_2_*.pth")
    moved = ["--config", "pendulum.yaml", "--env", "Pendulum-v1", "--output", "runs/moved"]
    user.types("import", checkpoint, *moved)
    assert "mean" in user.types("eval", "runs/moved", "--episodes", "4")
    assert "the same actions" in user.types("export", "runs/moved", "--output", "pendulum.pt2")
    told = user.types("resume", "runs/moved", "--until.iterations", "1")
    assert "ended by until.iterations" in told
