"""Copy what a member of a population has learned to another one, from checkpoint to checkpoint."""

from __future__ import annotations

from pathlib import Path

from canter.config import TrainConfig
from canter.core.plain import to_plain
from canter.core.storage.checkpoint import CheckpointStore
from canter.core.storage.validity import flatten
from canter.runs.run_folder import CHECKPOINTS

OWN = ("replay", "counters")
"""Parts of an algorithm's state that a member keeps."""
OWN_ENDS = ("_rng", "_state")
"""Ends of the names of further parts: random streams, and recurrent states of running episodes."""
FROM_LEADER = ("recent", "gain_and_time")
"""Counters of the run that belong to the policy: its recent episodes and rollouts."""
RATE = "algorithm.optimizer.learning_rate"
ROUND = "round"
"""Key of a checkpoint's identity: the comparison that wrote it."""


def copy_learner(leader: Path, member: Path, number: int, rate_factor: float = 1.0) -> None:
    """Replace the newest checkpoint of a member by one with the learner of a leader.

    Weights, optimizer state, coefficients and statistics are the leader's, with learning rates
    times a factor. Environments, random streams, replay buffer and counters stay the member's. A
    checkpoint that this comparison, `number`, has written already stays. The checkpoint is replaced
    atomically; the leader is not changed. A member may be its own leader.
    """
    store = CheckpointStore(member / CHECKPOINTS)
    if not store.steps():
        return  # it failed before its first checkpoint, and starts again
    step, own = store.load_latest()
    if own["identity"].get(ROUND) == number:
        return
    source = own if leader == member else CheckpointStore(leader / CHECKPOINTS).load_latest()[1]
    parts = source["algorithm"].items()
    learner = {name: part for name, part in parts if name not in OWN and not name.endswith(OWN_ENDS)}
    phases = learner["optimizers"].items() if rate_factor != 1.0 else ()
    for group in (group for name, phase in phases if name != "central_value" for group in phase.values()):
        group["learning_rate"] = group["learning_rate"] * rate_factor  # the central value has settings of its own
    store.save(
        step,
        {
            **own,
            "identity": {**own["identity"], ROUND: number},
            "algorithm": {**own["algorithm"], **learner},
            "run": {**own["run"], **{name: source["run"][name] for name in FROM_LEADER}},
        },
    )


def rate_key(config: TrainConfig) -> str:
    """Return the key of the learning rate, or of its start."""
    plain = flatten(to_plain(config))
    return f"{RATE}.start" if f"{RATE}.start" in plain else RATE


def follows_kl(config: TrainConfig, key: str) -> bool:
    """Return whether a setting is the start of a value that follows the KL; then the checkpoint has the value."""
    return key.endswith(".start") and f"{key.removesuffix('start')}target_kl" in flatten(to_plain(config))
