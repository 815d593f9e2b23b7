"""An arm of one joint in MuJoCo, as a student would write it."""

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.mujoco import MujocoEnv

XML = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body>
      <joint name="shoulder" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" fromto="0 0 0 0 0 0.3" size="0.02" mass="0.5"/>
    </body>
  </worldbody>
  <actuator><motor joint="shoulder" gear="2" ctrlrange="-1 1"/></actuator>
</mujoco>
"""


class Arm(MujocoEnv):
    """Hold the arm upright; the episode ends when it has fallen."""

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"],
        "render_fps": 50,
    }

    def __init__(self, **kwargs: Any) -> None:
        model = Path(__file__).with_name("arm.xml").resolve()
        if not model.exists():
            model.write_text(XML)
        super().__init__(str(model), 2, spaces.Box(-np.inf, np.inf, (3,), np.float64), **kwargs)

    def reset_model(self) -> np.ndarray:
        """Start near the top."""
        self.set_state(self.np_random.uniform(-0.5, 0.5, 1), self.np_random.uniform(-0.1, 0.1, 1))
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, float]]:
        """Apply a torque for 20 milliseconds."""
        self.do_simulation(action, self.frame_skip)
        angle = float(self.data.qpos[0])
        reward = np.cos(angle) - 0.01 * float(action[0]) ** 2
        return self._observe(), float(reward), abs(angle) > 1.5, False, {"angle": abs(angle)}

    def _observe(self) -> np.ndarray:
        angle = self.data.qpos[0]
        return np.array([np.cos(angle), np.sin(angle), self.data.qvel[0]])
