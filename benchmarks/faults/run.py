"""What Canter's files withstand: kills, damage, forgery and code in disguise.

    python benchmarks/faults/run.py                    the whole campaign, about ten minutes; writes results.json
    python benchmarks/faults/run.py --kills 5 ...      a small one, as in tests/faults

The exit code is 1 if a single folder was unusable, a resumed run was not exact, damage went unnoticed, an error was not
a clear one, something hung, or code was run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from disguise import disguise
from fuzz import fuzz_checkpoints, fuzz_configs, fuzz_policies, fuzz_records, quiet
from kills import NUM_ENVS, Campaign, Kills, spawn, train_arguments, wait

from canter.machine import describe_machine, describe_versions

RESULTS = Path(__file__).parent / "results.json"


def kill(scratch: Path, envs: list[str], kills: int, every: int, rng: random.Random) -> dict[str, Any]:
    """Random kills until there are enough, and aimed ones at every so many file operations of a save."""
    at_random, aimed = Kills(), Kills()
    for number, env_id in enumerate(envs, start=1):
        campaign = Campaign(env_id, scratch / "kills", at_random)
        share = kills * number // len(envs)
        while at_random.kills < share:
            campaign.random_chain(rng, most=min(8, share - at_random.kills))
        campaign.result = aimed
        campaign.aimed_kills(every)
    return {"random kills": asdict(at_random), "aimed kills": asdict(aimed)}


def fuzz(scratch: Path, arguments: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Damage and forgery of the files of one finished run."""
    runs = scratch / "fuzz"
    runs.mkdir(parents=True)
    if wait(spawn(train_arguments("tensor:cartpole", runs), runs / "log.txt")) != 0:
        raise RuntimeError((runs / "log.txt").read_text()[-2000:])
    kinds: dict[str, tuple[Callable[..., Any], int]] = {
        "fuzzed checkpoints": (fuzz_checkpoints, arguments.checkpoints),
        "fuzzed policies": (fuzz_policies, arguments.policies),
        "fuzzed configs": (fuzz_configs, arguments.configs),
        "fuzzed records": (fuzz_records, arguments.records),
        "code in disguise": (disguise, arguments.disguises),
    }
    with quiet():
        return {name: asdict(campaign(runs, count, rng)) for name, (campaign, count) in kinds.items()}


def failures(results: dict[str, Any]) -> list[str]:
    """All that went wrong."""
    lists = [kind.get(key, []) for kind in results.values() for key in ("unusable", "not_exact", "wrong")]
    return [text for found in lists for text in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--envs", nargs="+", default=list(NUM_ENVS), choices=NUM_ENVS, help="what the killed runs train"
    )
    parser.add_argument("--kills", type=int, default=120, help="kills at random moments")
    parser.add_argument("--every", type=int, default=1, help="aim a kill at every so many file operations of a save")
    for name, count in (("checkpoints", 1000), ("policies", 1000), ("configs", 1000), ("records", 500)):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"fuzzed {name}")
    parser.add_argument("--disguises", type=int, default=100, help="files with code in them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, start = random.Random(arguments.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        results = fuzz(Path(scratch), arguments, rng)
        results |= kill(Path(scratch), arguments.envs, arguments.kills, arguments.every, rng)
    document = {
        "command": " ".join(["python benchmarks/faults/run.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - start),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "results": results,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for name, kind in results.items():
        print(name, ", ".join(f"{key} {value}" for key, value in kind.items() if not isinstance(value, list)))
    found = failures(results)
    print("\n".join(found) or "nothing failed")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
