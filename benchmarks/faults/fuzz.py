"""Damaged and forged files of every kind, each of which must be refused by a clear error or do no harm.

Damage is what disks and people do: bits, blocks and ends of files change, files are swapped or missing. A forgery has
another content under right hashes. Code in disguise is a file that a careless reader would run.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import logging
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from kills import NAME, differences

from canter.app.cli import main
from canter.app.experiments.folders import stored_config
from canter.config import TrainConfig
from canter.config.files import dump_config
from canter.config.presets import presets
from canter.core.storage.checkpoint import FILES, MANIFEST, CheckpointCorrupt, CheckpointStore, NoCheckpoint
from canter.core.storage.validity import Mismatch
from canter.nn.policy_file import BEST, POLICIES, NoPolicy, PolicyFileCorrupt, read_policy_file, write_policy_file
from canter.nn.policy_loading import load_policy
from canter.runs.hall_of_fame import INDEX, HallOfFame, HallOfFameCorrupt
from canter.runs.records import RECORD, run_status
from canter.runs.run_folder import RunFolder
from canter.runs.state import TrainState
from canter.training.collector import Collector
from canter.training.progress import RunProgress

SECONDS = 10
"""What takes longer hangs."""
TREASURE = [0, 1, -1, 2**31, 2**63, 2**64, 1e308, -0.0, True, None, "", "nan", "inf", "../x", [], {}, [[]], {"": None}]
"""Values that readers trip over."""


@dataclass
class Fuzz:
    """What came of all cases of one kind."""

    cases: int = 0
    refused: int = 0
    """By an error that says what is wrong."""
    fine: int = 0
    """Loaded, and as it should be: the change had no effect, or the one before was used."""
    previous_used: int = 0
    """Of these, how often it was the one before."""
    wrong: list[str] = field(default_factory=list)
    """Raw errors, hangs, and damage that nobody noticed."""
    slowest: float = 0.0
    """Seconds of the slowest case."""


class Refused(Exception):
    """A command ended with one clear line."""


CLEAR = (CheckpointCorrupt, NoCheckpoint, PolicyFileCorrupt, NoPolicy, HallOfFameCorrupt, Mismatch, Refused)
"""Errors that say which file is meant and what is wrong with it."""


class Hang(BaseException):
    """A case that took too long; not to be caught as an error of the case."""


def judge(result: Fuzz, name: str, load: Callable[[], bool], seconds: int = SECONDS) -> None:
    """Count a case; `load` tells whether what was loaded is right."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    start = time.monotonic()
    result.cases += 1
    try:
        if load():
            result.fine += 1
        else:
            result.wrong.append(f"{name}: not noticed")
    except CLEAR:
        result.refused += 1
    except (Exception, Hang) as error:
        result.wrong.append(f"{name}: {type(error).__name__}: {error}"[:300])
    finally:
        signal.alarm(0)
        result.slowest = max(result.slowest, round(time.monotonic() - start, 3))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The same bytes after an accident."""
    if not data:
        return bytes(rng.randrange(1, 9))
    changed, at = bytearray(data), rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            for _ in range(rng.choice([1, 1, 1, 8])):
                changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            size = rng.randrange(1, 512)
            changed[at : at + size] = bytes(len(changed[at : at + size]))
        case 3:
            changed[at:at] = rng.randbytes(rng.randrange(1, 64))
        case _:
            del changed[at : at + rng.randrange(1, 64)]
    return bytes(changed)


def edited(document: Any, rng: random.Random) -> Any:
    """The same plain data with one value, name or list changed."""
    places = list(_places(document))
    holder, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[key + rng.choice(["x", "_", " "])] = holder.pop(key)
        case 2:
            other, elsewhere = rng.choice(places)
            holder[key] = copy.deepcopy(other[elsewhere])
        case _:
            holder[key] = copy.deepcopy(rng.choice(TREASURE))
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield document, key
        yield from _places(document[key])


def fuzz_checkpoints(runs: Path, count: int, rng: random.Random) -> Fuzz:
    """The newest of two checkpoints is damaged or forged; the one before must serve, or the run be refused."""
    result, folder = Fuzz(), runs / NAME
    config = stored_config(folder)
    store = CheckpointStore(folder / "checkpoints", keep_last=2)
    older, newest = store.steps()[-2:]
    trees = {step: CheckpointStore.load_latest(_only(store, step, runs))[1] for step in (older, newest)}
    env = config.env.build("cpu")
    algorithm = config.algorithm.build(env.spec, config.seed)
    collector = Collector(env, algorithm, seed=0)
    run = RunProgress(config.total_steps, config.success, collector.clock, config.until)
    parts = TrainState(algorithm, collector, run, config.seed)
    for case in range(count):
        fuzzed = runs / "fuzzed"
        shutil.copytree(folder / "checkpoints", fuzzed / "checkpoints")
        target, other = fuzzed / "checkpoints" / store.path(newest).name, store.path(older)
        forgery = case % 3 == 0
        name = forge_checkpoint(target, rng) if forgery else damage_checkpoint(target, other, rng)

        def load(fuzzed: Path = fuzzed, forgery: bool = forgery) -> bool:
            if forgery:  # whatever it says: it is refused, or all parts accept it
                return RunFolder(fuzzed).restore(parts)
            step, tree = CheckpointStore(fuzzed / "checkpoints").load_latest()
            result.previous_used += step == older
            return not differences(tree, trees[step])

        judge(result, f"checkpoint {case}, {name}", load)
        shutil.rmtree(fuzzed)
    env.close()
    return result


def _only(store: CheckpointStore, step: int, runs: Path) -> CheckpointStore:
    alone = runs / f"only-{step}"
    shutil.copytree(store.path(step), alone / store.path(step).name)
    return CheckpointStore(alone)


def damage_checkpoint(target: Path, other: Path, rng: random.Random) -> str:
    """An accident to one of its files, in words."""
    file = rng.choice(sorted(FILES))
    match rng.randrange(8):
        case 0:
            (target / file).unlink()
            return f"{file} missing"
        case 1:
            shutil.copy(other / file, target / file)
            return f"{file} of another checkpoint"
        case 2 if file != "tensors.safetensors":
            document = edited(json.loads((target / file).read_text()), rng)
            (target / file).write_text(json.dumps(document))
            return f"{file} edited"
    (target / file).write_bytes(damaged((target / file).read_bytes(), rng))
    return f"{file} damaged"


def forge_checkpoint(target: Path, rng: random.Random) -> str:
    """Another content of one of its files, with the right hash."""
    file = rng.choice(["state.json", "state.json", "tensors.safetensors"])
    data = (target / file).read_bytes()
    if file == "state.json" and rng.random() < 0.8:
        data = json.dumps(edited(json.loads(data), rng)).encode()
    elif file == "tensors.safetensors":
        head = 8 + int.from_bytes(data[:8], "little")
        data = damaged(data[:head], rng) + data[head:]
    else:
        data = damaged(data, rng)
    sign(target, file, data)
    return f"{file} forged"


def sign(target: Path, file: str, data: bytes) -> None:
    """Put a content into a checkpoint and make its manifest agree."""
    (target / file).write_bytes(data)
    manifest = json.loads((target / MANIFEST).read_text())
    manifest["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (target / MANIFEST).write_text(json.dumps(manifest))


def fuzz_policies(runs: Path, count: int, rng: random.Random) -> Fuzz:
    """A policy file is damaged or forged; what can be loaded must act as before, or at least with finite numbers."""
    result, source, fuzzed = Fuzz(), runs / NAME / POLICIES / BEST, runs / "fuzzed.safetensors"
    data, (info, tensors) = source.read_bytes(), read_policy_file(source)
    obs = {"policy": torch.linspace(-2, 2, 20).reshape(5, 4)}
    params, _ = load_policy(source).params(obs, ())
    for case in range(count):
        forgery = case % 3 == 0
        if forgery:
            about = edited({"model": info.model, "env": info.env}, rng) if rng.random() < 0.7 else {}
            about = {name: value for name, value in about.items() if name in ("model", "env")}
            renamed = {name if rng.random() < 0.95 else f"{name}x": tensor for name, tensor in tensors.items()}
            write_policy_file(fuzzed, replace(info, **json.loads(json.dumps(about))), renamed)
            info, tensors = read_policy_file(source)
        else:
            fuzzed.write_bytes(damaged(data, rng))

        def load(forgery: bool = forgery) -> bool:
            found, _ = load_policy(fuzzed).params(obs, ())
            return bool(found.isfinite().all()) if forgery else torch.equal(found, params)

        judge(result, f"policy {case}, {'forged' if forgery else 'damaged'}", load)
    fuzzed.unlink()
    return result


def fuzz_records(runs: Path, count: int, rng: random.Random) -> Fuzz:
    """Other files of a run and the hall of fame: their readers say that nothing is known, and never fail."""
    result = Fuzz()
    index = next((runs / "hall_of_fame").glob(f"*/{INDEX}"))
    hall = HallOfFame(runs / "hall_of_fame", json.loads(index.read_text())["problem"])
    readers: dict[Path, Callable[[], Any]] = {
        runs / NAME / RECORD: lambda: run_status(runs / NAME),
        runs / NAME / "metrics.jsonl": lambda: RunFolder(runs / NAME)._forget_after(3) is None,
        runs / NAME / "run.lock": lambda: run_status(runs / NAME),
        index: lambda: isinstance(hall.entries(), tuple),
    }
    (runs / NAME / "run.lock").write_text('{"pid": 1, "host": "x", "since": "", "birth": "", "token": ""}')
    originals = {path: path.read_bytes() for path in readers}
    for case in range(count):
        path = rng.choice(list(readers))
        data = damaged(originals[path], rng)
        if path.suffix == ".json" and rng.random() < 0.5:
            data = json.dumps(edited(json.loads(originals[path]), rng)).encode()
        path.write_bytes(data)
        judge(result, f"{path.name} {case}", lambda path=path: bool(readers[path]()))
        path.write_bytes(originals[path])
    (runs / NAME / "run.lock").unlink()
    return result


def fuzz_configs(scratch: Path, count: int, rng: random.Random) -> Fuzz:
    """A settings file is refused in one line that names the file, or read to settings that print and read alike."""
    result, file = Fuzz(), scratch / "config.yaml"
    for case in range(count):
        data = edited_settings(rng)
        file.write_bytes(data)
        judge(result, f"config {case}: {data[:40]!r}", lambda: _settings_hold(file))
    return result


@cache
def _texts() -> list[str]:
    return [*(dump_config(presets[name]) for name in presets), dump_config(TrainConfig())]


def edited_settings(rng: random.Random) -> bytes:
    """The settings of a preset after an accident, an edit or a slip of the hand."""
    text = rng.choice(_texts())
    match rng.randrange(3):
        case 0:
            return damaged(text.encode(), rng)
        case 1:
            return yaml.safe_dump(edited(yaml.safe_load(text), rng), sort_keys=False).encode()
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    odd = ["a: !!python/name:os.abort", "x: &a [*a]", "- 1", "? [1]", "env: {id: *b}", "\t", "seed: 1e999"]
    lines[at] = rng.choice([*odd, lines[at].replace(":", "", 1), f" {lines[at]}", lines[at][:-1]])
    return "\n".join(lines).encode()


def _settings_hold(file: Path) -> bool:
    refused_settings(file)
    _, out, _ = say("train", "--config", str(file), "--print-config")
    file.write_text(out)
    return say("train", "--config", str(file), "--print-config") == (0, out, "")


def refused_settings(file: Path) -> bool:
    """Raise `Refused` if a settings file is refused as it should be; False if it is accepted."""
    code, out, err = say("train", "--config", str(file), "--print-config")
    if code == 0:
        return False
    if code != 2 or not err.startswith(f"canter: {file}") or err.count("\n") != 1 or out:
        raise RuntimeError(f"exit code {code}, {err}")
    raise Refused(err)


def say(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, run in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the thousands of warnings that this is about."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
