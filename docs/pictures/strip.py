"""Draw `docs/_static/play.png`: pictures of a CartPole-v1 episode, as `canter play --caption` records it.

python docs/pictures/strip.py RUN
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import canter
from canter.envs import EnvConfig
from canter.play.callbacks import renderable_env_config
from canter.play.video import FilmStrip, Recorder, draw_without_display

PICTURE = Path(__file__).parents[1] / "_static" / "play.png"

if __name__ == "__main__":
    draw_without_display()
    strip = FilmStrip()
    strip.HEIGHT, strip.COUNT = 330, 2
    env = renderable_env_config(EnvConfig(id="CartPole-v1")).build("cpu")
    with tempfile.TemporaryDirectory() as folder, Recorder(env, Path(folder) / "episode.mp4", caption=True) as recorder:
        player = canter.Player(canter.load(sys.argv[1]), env, seed=0)
        player.play(1, 200, lambda turn: strip.add(recorder(turn)))
    strip.save(PICTURE)
