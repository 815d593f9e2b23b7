"""RSL-RL's vectorised environments of every generation, and the symmetries of its settings.

N environments, A action components; B samples, K blocks of them: the originals and their mirror
images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from canter.compat.drop_in import SourceEnv, imported_object
from canter.core.declarations import Symmetry
from canter.core.plain import ConfigError
from canter.core.specs import Continuous, Step
from canter.core.struct import Obs
from canter.envs.robots.vec_env import read_groups, read_observations, step_vec_env


class RslRlEnv(SourceEnv):
    """A VecEnv of RSL-RL.

    Groups of a TensorDict (3.x on), or the tensors of 1.x and 2.x as `policy` and `critic`.

    Actions are passed on as sampled.
    """

    def __init__(self, env: Any, device: str | torch.device = "cpu") -> None:
        super().__init__(env, device)
        infinite = (float("inf"),) * int(env.num_actions)
        action = Continuous(tuple(-x for x in infinite), infinite)
        name = type(getattr(env, "unwrapped", env)).__name__
        self.spec = self.describe(self.observe(), action, int(env.num_envs), env_id=name)

    def observe(self) -> Obs:
        """Return the current observations; the environment was reset by its creator."""
        return self.groups(read_observations(self.env))

    def groups(self, obs: Any) -> Obs:
        """Return observations of any generation as groups on the learner's device."""
        return {name: group.to(self.device) for name, group in read_groups(obs).items()}

    def reset(self, seed: int | None = None) -> Obs:
        """Return the current observations: RSL-RL's environments seed and reset themselves."""
        return self.observe()

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment."""
        obs, reward, done, extras = step_vec_env(self.env, action.to(self.env.device))
        metrics = extras.get("log") or extras.get("episode")
        reward = reward.to(self.device).float()
        return self.make_step(self.groups(obs), reward, done, extras.get("time_outs"), metrics)


KEY = "algorithm.symmetry_cfg.data_augmentation_func"


def symmetries_in(train_cfg: Mapping[str, Any], adapter: RslRlEnv) -> tuple[Symmetry, ...]:
    """Return the symmetries of the settings' function; none without a function.

    Of four blocks the last must be the image of an image, as with left and right, front and back.
    """
    section = (train_cfg.get("algorithm") or {}).get("symmetry_cfg") or {}
    if not (section.get("use_data_augmentation") or section.get("use_mirror_loss")):
        return ()
    function = imported_object(section.get("data_augmentation_func"), KEY)
    if not callable(function):
        raise ConfigError(f"{KEY}={function!r}: expected a function, or MODULE:FUNCTION", KEY)
    images = Images(function, adapter)
    one = torch.rand((1, adapter.env.num_actions), generator=torch.Generator().manual_seed(0)) + 0.5
    blocks = images.actions(one)
    if len(blocks) == 4 and torch.allclose(images.actions(blocks[1])[2], blocks[3], atol=1e-5):
        return images.symmetry(1), images.symmetry(2)
    if len(blocks) != 2:
        expected = "expected 2, or 4 of which the last is the image of an image: declare EnvSpec.symmetries"
        raise ConfigError(f"{KEY} returns {len(blocks)} blocks of samples, {expected}", KEY)
    return (images.symmetry(1),)


class Images:
    """The settings' function, called as its generation of RSL-RL calls it."""

    def __init__(self, function: Callable[..., Any], adapter: RslRlEnv) -> None:
        self.function = function
        self.env = adapter.env
        self.spec = adapter.spec
        self.container = type(adapter.env.get_observations())

    def symmetry(self, block: int) -> Symmetry:
        """Return one of the mirror images."""
        obs = {name: self._of_group(name, block) for name in self.spec.obs}
        shape = (int(self.env.num_actions),)
        return Symmetry(f"image {block}", obs, lambda x: self._rows(x, shape, lambda batch: self.actions(batch)[block]))

    def actions(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return all blocks of actions `[B, A]`."""
        old = {"obs_type": "policy"} if self.container in (tuple, Tensor) else {}
        return self.function(env=self.env, obs=None, actions=x, **old)[1].split(len(x))

    def _of_group(self, name: str, block: int) -> Callable[[Tensor], Tensor]:
        def blocks(x: Tensor) -> Tensor:
            if self.container in (tuple, Tensor):
                return self.function(env=self.env, obs=x, actions=None, obs_type=name)[0].split(len(x))[block]
            groups = {group: self._stand_in(group, x) for group in self.spec.obs} | {name: x}
            whole = groups if self.container is dict else self.container(groups, batch_size=[len(x)])
            return self.function(env=self.env, obs=whole, actions=None)[0][name].split(len(x))[block]

        return lambda obs: self._rows(obs, self.spec.obs[name].shape, blocks)

    def _stand_in(self, group: str, x: Tensor) -> Tensor:
        """Return zeros for an unused group: the function takes all groups at once."""
        return x.new_zeros((len(x), *self.spec.obs[group].shape))

    def _rows(self, x: Tensor, shape: tuple[int, ...], function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function to a tensor `[..., *shape]` as samples, on the environment's device."""
        return function(x.reshape(-1, *shape).to(self.env.device)).to(x.device).reshape(x.shape)
