"""What Canter's runs and files withstand: misbehaving environments, kills, damage, forgery, strangers' folders.

    python benchmarks/faults/run.py                       all parts; writes results.json
    python benchmarks/faults/run.py --parts kills ...     some of them; what the file says of the others stays
    python benchmarks/faults/run.py --kills 5 ...         a small one, as in tests/faults

The exit code is 1 if a failure cost more than a rollout or was not named, a single folder was unusable, a resumed run
was not exact, damage went unnoticed, an error was not a clear one, something hung, memory grew, or code was run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from disguise import disguise
from environments import misbehave
from fuzz import fuzz_checkpoints, fuzz_configs, fuzz_policies, fuzz_records, quiet
from hostile import by_command, fuzz_hostile
from kills import AIMED, CASES, Campaign, Kills, spawn, train_arguments, wait

from canter.core.machine import describe_machine, describe_versions

RESULTS = Path(__file__).parent / "results.json"


def kill(scratch: Path, arguments: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Random kills until there are enough or the time is up, and aimed ones at so many file operations of a save."""
    at_random, aimed = Kills(), Kills()
    for number, case in enumerate(arguments.cases, start=1):
        campaign = Campaign(case, scratch / "kills", at_random)
        share = arguments.kills * number // len(arguments.cases)
        until = time.monotonic() + arguments.seconds / len(arguments.cases)
        while at_random.kills < share and time.monotonic() < until:
            campaign.random_chain(rng, most=min(8, share - at_random.kills))
        if case in AIMED:
            campaign.result = aimed
            campaign.aimed_kills(arguments.every)
    return {"random kills": asdict(at_random), "aimed kills": asdict(aimed)}


def finished_run(scratch: Path) -> Path:
    """The parent of a run to be damaged."""
    if wait(spawn(train_arguments("tensor:cartpole", scratch), scratch / "log.txt")) != 0:
        raise RuntimeError((scratch / "log.txt").read_text()[-2000:])
    return scratch


def fuzz(scratch: Path, arguments: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Damage and forgery of the files of one finished run."""
    runs = finished_run(scratch)
    kinds: dict[str, tuple[Callable[..., Any], int]] = {
        "fuzzed checkpoints": (fuzz_checkpoints, arguments.checkpoints),
        "fuzzed policies": (fuzz_policies, arguments.policies),
        "fuzzed configs": (fuzz_configs, arguments.configs),
        "fuzzed records": (fuzz_records, arguments.records),
        "code in disguise": (disguise, arguments.disguises),
    }
    with quiet():
        return {name: asdict(campaign(runs, count, rng)) for name, (campaign, count) in kinds.items()}


def hostile(scratch: Path, arguments: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Strangers' folders in this process, and damage of every kind by command."""
    runs = finished_run(scratch)
    commands = by_command(runs, arguments.commands, rng)  # first: they are forks, which want no threads to lose
    with quiet():
        inside = fuzz_hostile(runs, arguments.hostile, rng)
    return {"hostile files": asdict(inside)} | {name: asdict(result) for name, result in commands.items()}


def misbehaving(scratch: Path, arguments: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Runs of environments that raise, hang, die or break their contract."""
    return {"misbehaving environments": asdict(misbehave(scratch, arguments.misbehaving))}


PARTS: dict[str, Callable[[Path, argparse.Namespace, random.Random], dict[str, Any]]] = {
    "misbehaving": misbehaving,
    "fuzz": fuzz,
    "hostile": hostile,
    "kills": kill,
}


def failures(results: dict[str, Any]) -> list[str]:
    """All that went wrong."""
    lists = [kind.get(key, []) for kind in results.values() for key in ("unusable", "not_exact", "wrong")]
    return [text for found in lists for text in found]


def arguments_of_the_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=CASES, help="configurations of the runs that are killed"
    )
    parser.add_argument("--kills", type=int, default=1000, help="kills at random moments")
    parser.add_argument("--seconds", type=float, default=7200, help="time for random kills, evenly for all cases")
    parser.add_argument("--every", type=int, default=1, help="aim a kill at every so many file operations of a save")
    counts = {"checkpoints": 5000, "policies": 3000, "configs": 5000, "records": 2000, "hostile": 500, "commands": 200}
    for name, count in counts.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"cases of {name}")
    parser.add_argument("--misbehaving", type=int, default=1000, help="misbehaving environments, at most all cases")
    parser.add_argument("--disguises", type=int, default=100, help="files with code in them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the results")
    return parser.parse_args()


def in_a_process_of_its_own(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a part found.

    Parts fork commands, and a process that has computed with threads leaves its forks waiting for them: so no part runs
    in the process of another.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "part.json"
        pid = os.fork()
        if not pid:
            try:
                out.write_text(json.dumps(examine(part, Path(scratch), arguments)))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        wait(pid)
        return json.loads(out.read_text())


def examine(part: str, scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Results of a part, and how they came about."""
    start = time.monotonic()
    results = PARTS[part](scratch, arguments, random.Random(arguments.seed))
    return {
        "command": " ".join(["python benchmarks/faults/run.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - start),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "results": results,
    }


def main() -> None:
    arguments = arguments_of_the_command()
    torch.set_num_threads(1)
    document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    document = {"parts": document.get("parts", {})}
    found: list[str] = []
    for part in arguments.parts:
        document["parts"][part] = in_a_process_of_its_own(part, arguments)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        results = document["parts"][part]["results"]
        for name, kind in results.items():
            said = ", ".join(f"{key} {value}" for key, value in kind.items() if not isinstance(value, list))
            print(name, said, flush=True)
        found += failures(results)
    print("\n".join(found) or "nothing failed")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
