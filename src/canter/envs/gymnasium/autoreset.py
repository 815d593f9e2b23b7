"""Which of Gymnasium's three ways a vector environment uses to begin the next episode."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK
from canter.envs.spaces import ObsReader

logger = logging.getLogger(__name__)

_SPELLINGS = {mode.value.lower(): mode for mode in AutoresetMode}

_HOW_TO_DECLARE = """
  next_step: the step after an end ignores its action, resets and gives reward 0
  same_step: the ending step resets already; the last observation is in info["final_obs"]
  disabled:  the caller resets, with reset(options={"reset_mask": mask})
Say which one it is: env.metadata["autoreset_mode"] = gymnasium.vector.AutoresetMode.SAME_STEP on the environment, or
the argument autoreset="same_step" here."""


def parse_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """A mode by any usual spelling: `next_step`, `NEXT_STEP`, `NextStep` or the enum itself."""
    if isinstance(mode, AutoresetMode):
        return mode
    key = str(mode).replace("_", "").replace("-", "").lower()
    if key not in _SPELLINGS:
        raise UserError(f"autoreset mode {mode!r} is unknown; the modes are next_step, same_step and disabled")
    return _SPELLINGS[key]


def find_mode(env: VectorEnv, wanted: AutoresetMode | str | None, reader: ObsReader, max_steps: int) -> AutoresetMode:
    """The mode `env` declares, else the `wanted` one, else what a probe proves; a ValueError when nothing does.

    The probe steps `env` with random actions and resets it at the end.
    """
    declared = (env.metadata or {}).get("autoreset_mode")
    said = [parse_mode(mode) for mode in (declared, wanted) if mode is not None]
    if len(set(said)) > 1:
        raise UserError(
            f"autoreset={said[1].name.lower()!r} contradicts {env}, which declares {said[0].name.lower()!r}; "
            "leave the argument out, or make the environment with the other mode"
        )
    if said:
        return said[0]
    mode = _Probe(env, reader).run(max_steps)
    if mode is None:
        raise UserError(
            f"{env} does not declare how it resets, and {max_steps} random steps did not prove one of the three ways:"
            + _HOW_TO_DECLARE
        )
    env.reset()
    logger.info("%s does not declare how it resets; a probe found %s", env, mode.name.lower())
    return mode


class _Probe:
    """Steps an environment until episodes end and looks at what comes after.

    Only evidence that no other mode can produce counts; each end that leaves doubt is passed over.
    """

    def __init__(self, env: VectorEnv, reader: ObsReader) -> None:
        self._env, self._reader, self._buffer = env, reader, reader.buffer()
        self._always_rewarded = True
        """No ordinary step has given a reward of 0 so far."""

    def run(self, max_steps: int) -> AutoresetMode | None:
        raw, info = self._env.reset(seed=0)
        if ACTION_MASK in info or ACTION_MASK in self._reader.specs:
            return None  # random actions may be illegal, and what an illegal action does proves nothing
        self._env.action_space.seed(0)
        start = self._read(raw)
        for _ in range(max_steps):
            obs, reward, done, info = self._step()
            self._always_rewarded &= bool((reward != 0).all())
            if done.any():
                mode = self._examine(start, obs, done, info)
                if mode is not None:
                    return mode
                start = self._read(self._env.reset()[0])
        return None

    def _step(self) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, dict[str, Any]]:
        raw, reward, terminated, truncated, info = self._env.step(self._env.action_space.sample())
        done = np.asarray(terminated, dtype=bool) | np.asarray(truncated, dtype=bool)
        return self._read(raw), np.array(reward), done, info

    def _read(self, raw: Any) -> dict[str, np.ndarray]:
        self._reader.write(self._buffer, raw)
        return {name: array.copy() for name, array in self._buffer.arrays.items()}

    def _examine(
        self, start: dict[str, np.ndarray], last: dict[str, np.ndarray], ended: np.ndarray, info: dict[str, Any]
    ) -> AutoresetMode | None:
        """The mode that the end of rows `ended` proves, if any."""
        if info.get("final_obs") is not None:
            return self._names_final_obs(last, ended, info["final_obs"])
        try:
            obs, reward, done, info = self._step()
        except Exception:  # whatever it raises, it objects to stepping a finished episode
            return AutoresetMode.DISABLED if self._resets_by_mask(last, ended) else None
        if done[ended].all():
            return self._stays_ended(ended)
        if done[ended].any() or reward[ended].any() or not _differ(last, obs)[ended].all():
            return None
        if not _differ(start, obs)[ended].any() and _differ(start, last)[ended].all():
            return AutoresetMode.NEXT_STEP
        _, reward, _, _ = self._step()
        # A dead row would get no reward now, and a row reset in the ending step would have got one in the step before.
        return AutoresetMode.NEXT_STEP if self._always_rewarded and reward[ended].all() else None

    def _names_final_obs(self, last: dict[str, np.ndarray], ended: np.ndarray, final: Any) -> AutoresetMode | None:
        try:
            self._reader.write_final(self._buffer, final, ended)
        except ValueError:
            return None
        # Were they equal, this might be another mode that names the last observation twice.
        return AutoresetMode.SAME_STEP if _differ(last, self._buffer.arrays)[ended].any() else None

    def _stays_ended(self, ended: np.ndarray) -> AutoresetMode | None:
        """Finished rows that go on reporting their end need a reset; episodes of one step look alike until then."""
        steps = [self._step() for _ in range(3)]
        if not all(done[ended].all() for _, _, done, _ in steps):
            return None
        obs, _, done, _ = steps[-1]
        revived = self._resets_by_mask(obs, done) and not self._step()[2][ended].any()
        return AutoresetMode.DISABLED if revived else None

    def _resets_by_mask(self, before: dict[str, np.ndarray], ended: np.ndarray) -> bool:
        """Whether `reset_mask` brings the ended rows back so that they can be stepped, and touches no others."""
        first = np.arange(len(ended)) == np.argmax(ended)
        try:
            # First one row alone: when all ended together, a reset of all would not show that the mask is respected.
            for mask in (first, ended & ~first):
                if mask.any():
                    obs = self._read(self._env.reset(options={"reset_mask": mask.copy()})[0])
                    if _differ(before, obs)[~mask].any():
                        return False
                    before = obs
            self._step()
        except Exception:  # an environment that cannot be reset this way is not in disabled mode
            return False
        return True


def _differ(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> np.ndarray:
    """Bool `[N]`: rows in which two observations differ."""
    return np.any([(a != other[key]).reshape(len(a), -1).any(axis=1) for key, a in one.items()], axis=0)
