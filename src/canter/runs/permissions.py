"""Which modules a run may import again: those that its user trusted when it was made.

Whoever trains with `--allow-import my_module`, or gives a class of a module to Python, trusts that module. The run
keeps it in `imports.json`, signed with a secret of this user, so that later commands need not be told again. A folder
that comes from elsewhere carries no such signature and is trusted with nothing.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from canter.core.storage.files import replace_file
from canter.core.storage.lock import folder_mutex
from canter.core.storage.strict import Malformed, read_json, write_json
from canter.envs.imports import allow_import, allowed_imports, import_trusted

IMPORTS = "imports.json"

_log = logging.getLogger(__name__)


def save_trusted_modules(folder: Path, run: str) -> None:
    """Keep what is trusted now in a run's folder; where that cannot be, later commands must be told again."""
    modules = allowed_imports()
    if not modules:
        return
    try:
        content = {"run": run, "modules": modules}
        write_json(folder / IMPORTS, content | {"signature": _signature(content, _secret(create=True))})
    except OSError as error:
        _log.warning("later commands for this run need --allow-import again (%s)", error)


def trusted_modules(folder: Path) -> dict[str, str]:
    """Modules that this user trusted for a run, and where they are; nothing for a run of somebody else."""
    try:
        found, secret = read_json(folder / IMPORTS), _secret()
    except (OSError, Malformed):
        return {}
    match found:
        case {"run": str(run), "modules": dict(modules), "signature": str(signature)}:
            if hmac.compare_digest(signature.encode(), _signature({"run": run, "modules": modules}, secret).encode()):
                return {str(module): str(place) for module, place in modules.items()}
    return {}


def import_trusted_modules(folder: Path) -> None:
    """Trust again what was trusted when the run was made, and import it for what it registers."""
    for module, place in trusted_modules(folder).items():
        allow_import(module, place)
        try:
            import_trusted(module)
        except Exception as error:  # it may not be needed, as with --env
            _log.warning("%s, which this run was made with, cannot be imported from %s (%s)", module, place, error)


def _signature(content: dict[str, Any], secret: bytes) -> str:
    return hmac.new(secret, json.dumps(content, sort_keys=True).encode(), "sha256").hexdigest()


def _secret(*, create: bool = False) -> bytes:
    """What only this user knows."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "canter" / "secret"
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
        with folder_mutex(path.parent):  # two runs may begin at once
            if not path.exists():
                replace_file(path, secrets.token_hex(32).encode())
    return path.read_bytes()
