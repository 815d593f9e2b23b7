"""Adapter of batched simulators written in JAX to Canter's environment protocol.

N environments. A step is one XLA program: the dynamics, the end of episodes, the true last
observations and the restart. Tensors are handed over by DLPack in both directions, without copies
and without waiting for the device.

Order on a GPU, where torch and XLA have streams and memory pools of their own: the action's import
makes XLA's stream wait for torch's current stream, and the results' export makes torch's current
stream wait for XLA's. So neither side reads what the other has not written yet, nor reuses memory
that the other still reads, provided that torch uses the results on the stream that steps. No buffer
is donated: torch may hold views of all results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from torch import Tensor

from canter.core.registry import UserError
from canter.core.specs import ActionSpec, Continuous, EnvSpec, Step, TensorSpec
from canter.core.struct import Obs
from canter.envs.spaces import POLICY

MatmulPrecision = Literal["default", "high", "highest"]
GROUPS = {"state": "policy", "privileged_state": "critic"}
"""Canter's names of the observations of Brax and Playground that are several arrays."""


class Outcome(NamedTuple):
    """Result of one step of N environments, as JAX arrays."""

    obs: Mapping[str, Any]
    """Observations to act on next, after the restart of ended environments."""
    reward: Any
    """`[N]`."""
    terminated: Any
    """`[N]` bool."""
    truncated: Any
    """`[N]` bool, without terminations."""
    final_obs: Mapping[str, Any]
    """Observations before the restart."""
    metrics: Any
    """Values `[N]` by name, of which the means are logged; `JaxEnv` stacks the means."""


@dataclass(frozen=True)
class JaxTask:
    """N environments of one task as pure functions."""

    env_id: str
    num_envs: int
    action: ActionSpec
    reset: Callable[[Any], tuple[Any, Mapping[str, Any]]]
    """Return the state and the observations of N new episodes, drawn from a key."""
    step: Callable[[Any, Any, Any], tuple[Any, Outcome]]
    """Return state and outcome of one step from a key, the state and the actions."""


class JaxEnv:
    """N environments written in JAX, stepped by one XLA program on the device of the tensors.

    `matmul_precision` is the precision of float32 matrix products on a GPU: "default" is JAX's own,
    which is TF32 there. The state is saved completely. Without a seed `reset` continues the random
    stream.
    """

    def __init__(self, task: JaxTask, device: str, matmul_precision: MatmulPrecision = "highest") -> None:
        if matmul_precision not in get_args(MatmulPrecision):
            known = ", ".join(get_args(MatmulPrecision))
            raise UserError(f"env.options.matmul_precision={matmul_precision!r} must be one of {known}")
        self.task = task
        self.device = torch.empty(0, device=device).device
        self.matmul_precision = matmul_precision
        self._jax_device = find_device(self.device)
        self._reset = jax.jit(self._reset_batch)
        self._step = jax.jit(self._step_batch)
        self._key = jax.device_put(_make_key(int(np.random.SeedSequence().generate_state(1)[0])), self._jax_device)
        self._state: Any = None
        """Key and state of the simulator; None before the first reset."""
        shapes = jax.eval_shape(self._reset_batch, self._key)[1]
        self.spec = EnvSpec(
            {name: TensorSpec(shape.shape[1:], _torch_dtype(shape.dtype)) for name, shape in shapes.items()},
            task.action,
            task.num_envs,
            self.device,
            truncates=True,
            env_id=task.env_id,
        )
        """Shapes, dtypes, bounds and conventions."""
        self._valid = torch.ones(task.num_envs, dtype=torch.bool, device=self.device)
        self._metrics: tuple[str, ...] = ()

    def about(self) -> str:
        """Return how a step is run, for `canter check`."""
        platform = f"{self._jax_device.platform} (JAX {jax.__version__})"
        return f"a step is one XLA program on {platform}, matrix products in precision {self.matmul_precision}"

    def reset(self, seed: int | None = None) -> Obs:
        """Start an episode in every environment; return observations `[N, ...]`."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # it may still read memory that XLA reuses
        if seed is not None:
            self._key = jax.device_put(_make_key(seed), self._jax_device)
        elif self._state is not None:
            self._key = self._state[0]
        self._state, obs = self._reset(self._key)
        return _to_tensors(obs)

    def step(self, action: Tensor) -> Step:
        """Apply one action per environment; `Step.final_obs` is set in every row, ended or not."""
        if self._state is None:
            raise RuntimeError(f"{self.spec.env_id} has no state yet; call reset() before step()")
        if not isinstance(self.spec.action, Continuous):
            action = action.to(torch.int32)  # JAX has no int64 by default
        # The action must live until the results are imported: then torch's stream waits for their reader.
        action = action.detach().contiguous()
        self._state, outcome = self._step(self._state, jax.dlpack.from_dlpack(action))
        return self._to_step(outcome)

    def compile_rollout(self, act: Callable[..., Any]) -> Callable[..., tuple[tuple[Tensor, ...], Step]]:
        """Return a function of weights, observations and noise `[T, N, ...]` that steps T times in one XLA program."""

        def scan(state: Any, obs: Any, weights: Any, noise: Any) -> Any:
            def one(carry: Any, noise: Any) -> Any:
                action, record = act(weights, carry[1], noise)
                state, outcome = self._step_batch(carry[0], action)
                return (state, outcome.obs), (record, outcome)

            (state, _), results = jax.lax.scan(one, (state, obs), noise)
            return state, results

        program = jax.jit(scan)

        def run(weights: list[Tensor], obs: Obs, noise: Tensor) -> tuple[tuple[Tensor, ...], Step]:
            groups = {name: jax.dlpack.from_dlpack(group) for name, group in obs.items()}
            arrays = [jax.dlpack.from_dlpack(tensor) for tensor in weights]
            self._state, (record, outcome) = program(self._state, groups, arrays, jax.dlpack.from_dlpack(noise))
            return tuple(torch.from_dlpack(array) for array in record), self._to_step(outcome)

        return run

    def _to_step(self, outcome: Outcome) -> Step:
        """Return the tensors of one step, or of T with a leading axis."""
        means = torch.from_dlpack(outcome.metrics).unbind(-1) if self._metrics else ()
        return Step(
            obs=_to_tensors(outcome.obs),
            reward=torch.from_dlpack(outcome.reward),
            terminated=torch.from_dlpack(outcome.terminated),
            truncated=torch.from_dlpack(outcome.truncated),
            valid=self._valid,
            final_obs=_to_tensors(outcome.final_obs),
            metrics=dict(zip(self._metrics, means, strict=True)),
        )

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that builds `state_dict` of the present state; arrays of JAX never change."""
        state = self._state
        if state is None:
            raise RuntimeError(f"{self.spec.env_id} has no state yet; call reset() before state_dict()")
        return lambda: {name: _to_saved(leaf) for name, leaf in _leaves(state).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of every array of the simulator's state, by its path."""
        return self.snapshot()()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; continuing is exact with equal options, device kind and JAX."""
        shapes = jax.eval_shape(self._reset_batch, self._key)[0]
        own = _leaves(shapes)
        layout = {name: (tuple(shape.shape), _torch_dtype(shape.dtype)) for name, shape in own.items()}
        saved = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
        different = sorted(name for name in layout.keys() | saved.keys() if layout.get(name) != saved.get(name))
        if different:
            raise UserError(
                f"the saved state does not fit {self.spec.env_id} with num_envs={self.spec.num_envs} and these "
                f"options; these arrays differ in shape or dtype: {', '.join(different)}"
            )
        arrays = [state[name].cpu().numpy().view(shape.dtype) for name, shape in own.items()]
        self._state = jax.device_put(jax.tree.unflatten(jax.tree.structure(shapes), arrays), self._jax_device)

    def close(self) -> None:
        """Free the state; calling it twice is fine."""
        self._state = None

    def _reset_batch(self, key: Any) -> Any:
        with jax.default_matmul_precision(self.matmul_precision):
            key, draw = jax.random.split(key)
            state, obs = self.task.reset(draw)
        return _strong((key, state)), _to_groups(obs)

    def _step_batch(self, carry: Any, action: Any) -> Any:
        with jax.default_matmul_precision(self.matmul_precision):
            key, draw = jax.random.split(carry[0])
            state, outcome = self.task.step(draw, carry[1], action)
        self._metrics = tuple(outcome.metrics)  # written once, when the step is compiled
        means = [value.astype(jnp.float32).mean() for value in outcome.metrics.values()]
        outcome = outcome._replace(
            obs=_to_groups(outcome.obs),
            reward=outcome.reward.astype(jnp.float32),
            final_obs=_to_groups(outcome.final_obs),
            metrics=jnp.stack(means) if means else (),
        )
        return _strong((key, state)), outcome


def find_device(device: torch.device) -> Any:
    """Return JAX's device of a torch device; raise UserError if JAX cannot use it."""
    try:
        found = jax.local_devices(backend=device.type)
    except RuntimeError as error:
        raise UserError(
            f"device={device}: JAX {jax.__version__} is installed without support for it; "
            'pip install "jax[cuda13]" (or "jax[cuda12]", as torch has it), or take device=cpu'
        ) from error
    return next(other for other in found if device.type == "cpu" or other.local_hardware_id == device.index)


def _make_key(seed: int) -> Any:
    return jax.random.PRNGKey(seed % 2**32)


def _to_groups(obs: Any) -> dict[str, Any]:
    """Return observations by Canter's names of their groups, as float32 or, for pictures, uint8."""
    groups: dict[str, Any] = dict(obs) if isinstance(obs, Mapping) else {POLICY: obs}
    return {
        GROUPS.get(name, name): array if array.dtype == jnp.uint8 else array.astype(jnp.float32)
        for name, array in groups.items()
    }


def _strong(tree: Any) -> Any:
    """Return arrays without JAX's weak types, so that later steps need no second compilation."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), tree)


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _torch_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of saved arrays and observations; keys, which are uint32, are saved as int32."""
    return torch.int32 if dtype == jnp.uint32 else torch.from_numpy(np.zeros(0, dtype)).dtype


def _to_tensors(groups: Mapping[str, Any]) -> Obs:
    return {name: torch.from_dlpack(array) for name, array in groups.items()}


def _to_saved(array: Any) -> Tensor:
    tensor = torch.from_dlpack(array).clone()  # memory of torch, which no later step of XLA reuses
    return tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor
