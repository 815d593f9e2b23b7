"""Which tests mirror a file of the package, and in which order they run on a mistake in it."""

from __future__ import annotations

from pathlib import Path

from mutations import ROOT

NEAR = {
    "functional/densities.py": ("functional/test_densities.py", "nn/test_distributions.py", "functional"),
    "functional/losses.py": ("functional/test_losses.py", "functional/test_soft.py", "algorithms/test_objectives.py"),
    "functional/optimization.py": (
        "functional/test_optimization.py",
        "algorithms/test_phase.py",
        "nn/test_optimizer.py",
    ),
    "functional/statistics.py": ("functional/test_stats.py", "functional/test_aggregate.py", "functional"),
    "functional/layers.py": ("functional/test_layers.py", "nn", "engines/kernels", "functional"),
    "functional/": ("functional", "engines/native/test_native_sums.py", "engines/native/test_native_adamw.py"),
    "algorithms/extensions/": ("algorithms/extensions/test_gradients.py", "algorithms/extensions"),
    "algorithms/sac/": ("algorithms/test_sac.py", "engines/native/test_native_sac.py", "algorithms"),
    "algorithms/ppo/": ("algorithms/test_ppo_targets.py", "algorithms/test_recurrent.py", "algorithms"),
    "algorithms/": ("algorithms",),
    "engines/autograd.py": (
        "engines/test_autograd.py",
        "algorithms/test_objectives.py",
        "engines",
        "parity/test_updates.py",
    ),
    "engines/native/functions.c": (
        "engines/native/test_native_copies.py",
        "engines/native/test_native_sums.py",
        "engines",
    ),
    "engines/native/": ("engines",),
    "nn/optimizer.py": ("nn/test_optimizer.py", "algorithms/test_policy_average.py", "nn"),
    "nn/network.py": ("nn/test_network.py", "nn/test_actor_critic.py", "nn"),
    "nn/": ("nn",),
    "core/data/rollout.py": ("core/data/test_rollout.py", "algorithms/test_lost_observation.py", "algorithms"),
    "core/data/": ("core/data",),
    "core/storage/tree.py": ("core/storage/test_checkpoint.py", "core/storage"),
    "core/storage/": ("core/storage",),
    "training/collector.py": ("training/test_collector.py", "training/test_progress.py", "training"),
    "training/episodes.py": ("training/test_collector.py", "training/black_box/test_replay.py", "training"),
    "training/rollback.py": ("training/test_rescue.py", "training/black_box/test_replay.py", "training"),
    "training/trainer.py": (
        "training/test_until.py",
        "training/test_trainer.py",
        "training/test_log_every.py",
        "training",
    ),
    "training/": ("training",),
}
"""Tests that mirror a package, below `tests`; the first prefix that fits a mutation's file counts.

Files that are named here, and those whose name contains that of the changed file, run first.
"""


def test_groups(file: str, near_only: bool) -> list[list[str]]:
    """Return groups of test files for a mutation of `file`, those closest to it first."""
    tests = ROOT / "tests"
    places = next(places for prefix, places in NEAR.items() if file.startswith(prefix))
    named = [tests / place for place in places if (tests / place).is_file()]
    near = [path for place in places for path in sorted((tests / place).rglob("test_*.py"))]
    near = list(dict.fromkeys(named + near))
    closest = [path for path in near if path in named or Path(file).stem in path.stem] or near[:3]
    groups = [closest, [path for path in near if path not in closest]]
    if not near_only:
        groups.append([path for path in sorted(tests.rglob("test_*.py")) if path not in near])
    return [[str(path.relative_to(ROOT)) for path in group] for group in groups if group]
