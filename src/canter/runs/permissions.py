"""Modules that a run may import again: those that its user trusted when it was made.

A user who trains with `--allow-import my_module`, or passes a class of a module to Python, trusts
that module. The run records it in `imports.json`, signed with a secret of this user, so that later
commands need no flag. A folder from elsewhere lacks this signature, and nothing in it is trusted.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from canter.core.storage.files import Malformed, read_json, replace_file, write_json
from canter.core.storage.lock import folder_mutex
from canter.envs.imports import allow_import, allowed_imports, import_trusted

IMPORTS = "imports.json"

_log = logging.getLogger(__name__)


def save_trusted_modules(folder: Path, run: str) -> None:
    """Record the currently trusted modules in a run's folder."""
    modules = allowed_imports()
    if not modules:
        return
    try:
        content = {"run": run, "modules": modules}
        write_json(folder / IMPORTS, content | {"signature": _signature(content, _secret(create=True))})
    except OSError as error:
        _log.warning("later commands for this run need --allow-import again (%s)", error)


def trusted_modules(folder: Path) -> dict[str, str]:
    """Return the modules that this user trusted for a run, with their paths."""
    try:
        content = read_json(folder / IMPORTS)
        secret = _secret()
    except (OSError, Malformed):
        return {}
    match content:
        case {"run": str(run), "modules": dict(modules), "signature": str(signature)}:
            if hmac.compare_digest(signature.encode(), _signature({"run": run, "modules": modules}, secret).encode()):
                return {str(module): str(place) for module, place in modules.items()}
    return {}


def import_trusted_modules(folder: Path) -> None:
    """Trust the modules of a run again, and import them for what they register."""
    for module, place in trusted_modules(folder).items():
        allow_import(module, place)
        try:
            import_trusted(module)
        except Exception as error:  # it may not be needed, as with --env
            _log.warning("%s, which this run was made with, cannot be imported from %s (%s)", module, place, error)


def _signature(content: dict[str, Any], secret: bytes) -> str:
    return hmac.new(secret, json.dumps(content, sort_keys=True).encode(), "sha256").hexdigest()


def _secret(*, create: bool = False) -> bytes:
    """Return the secret of this user, which signs `imports.json`."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "canter" / "secret"
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
        with folder_mutex(path.parent):  # two runs may start at once
            if not path.exists():
                replace_file(path, secrets.token_hex(32).encode(), 0o600)
    return path.read_bytes()
