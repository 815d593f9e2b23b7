"""EnvPool: batches of environments stepped by C++ threads, as Canter environments.

Measured with EnvPool 1.2.5 on its classic control and MuJoCo tasks (`tests/envs/test_envpool.py`
repeats it): the ending step returns the true last observation; the next one ignores its action and
returns the first observation of the next episode with reward 0 and no flag. That is Gymnasium's
`next_step` mode, and the pool is adapted as such.

NOTE: EnvPool reports an end as truncated whenever it falls on the last allowed step, also when the
task ended by itself there; nothing it returns tells the two apart. Such an end is bootstrapped,
though nothing follows.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canter.core.registry import UserError, nearest
from canter.core.specs import Step
from canter.core.struct import Obs
from canter.envs.gymnasium import GymnasiumEnv, env_seeds

_NO_LIMIT = np.iinfo(np.int32).max
_SEED_BITS = 31
"""EnvPool's seeds are signed 32-bit integers."""


class EnvPoolEnv:
    """EnvPool's C++ threads, such as envpool:HalfCheetah-v4 (pip install "canter[envpool]").

    N environments; every step after an end is a filler row (`Step.valid` False).

    EnvPool takes its seeds when it is made and never again. So `reset(seed)` makes a new pool,
    unless this one was made with the same seed and not reset yet: pass `seed` here to avoid making
    it twice. Without a seed the environments are seeded from the operating system. `num_threads` 0
    leaves the number to EnvPool. `options` go to `envpool.make`. See `GymnasiumEnv` for
    `info_keys`.
    """

    seeds_by_row = True

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        *,
        seed: int | None = None,
        num_threads: int = 0,
        info_keys: str | Sequence[str] = (),
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        self._env_id = env_id
        self._num_envs = num_envs
        self._options = {"num_threads": num_threads, **options}
        self._adapter_options = {"info_keys": info_keys, "log_info": False, "device": device}
        self._make(seed)

    def _make(self, seed: int | None) -> None:
        entropy = np.random.SeedSequence().entropy if seed is None else seed
        assert isinstance(entropy, int)
        pool = _make_pool(self._env_id, self._num_envs, env_seeds(entropy, self._num_envs, _SEED_BITS), self._options)
        config = pool.config
        if config.get("max_num_players", 1) > 1:
            raise UserError(
                f"{self._env_id} has up to {config['max_num_players']} players per environment; only environments with "
                "one player fit the rows here"
            )
        with warnings.catch_warnings():
            # Bounds are float64 while spaces are float32, and Gymnasium warns of it every time.
            warnings.filterwarnings("ignore", message=".*precision lowered")
            self._env = GymnasiumEnv(
                pool, autoreset="next_step", env_id=f"envpool:{self._env_id}", **self._adapter_options
            )
        limited = 0 < config.get("max_episode_steps", _NO_LIMIT) < _NO_LIMIT
        self.spec = replace(self._env.spec, truncates=limited)
        """Shapes, dtypes, bounds and conventions."""
        self._unused_seed = seed

    def reset(self, seed: int | None = None) -> Obs:
        """Reset every environment, with a seed in a new pool; return observations `[N, ...]`."""
        if seed is not None and seed != self._unused_seed:
            self._env.close()
            self._make(seed)
        self._unused_seed = None
        return self._env.reset()

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment: `[N, A]` float32, `[N]` int64 or `[N, K]` int64."""
        return self._env.step(action)

    def absent_info(self) -> str | None:
        """Return an error about a requested entry of `info` that no step has had so far; None if all appeared."""
        return self._env.absent_info()

    def close(self) -> None:
        """Close the pool; calling it twice is fine."""
        self._env.close()


def _make_pool(env_id: str, num_envs: int, seeds: list[int], options: dict[str, Any]) -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ImportError(f'{env_id} needs EnvPool: pip install "canter[envpool]"') from error
    known = envpool.list_all_envs()
    if env_id not in known:
        raise UserError(f"unknown EnvPool task {env_id!r}: {nearest(env_id, known)}")
    return envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=seeds, **options)
