"""JSON from files that anybody may have written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from canter.storage.durable import replace_file
from canter.storage.untrusted import read_untrusted

MAX_JSON_BYTES = 1 << 20
"""Larger files are refused unread."""


class Malformed(ValueError):
    """Bytes that `encode` never writes; the message says how."""


def parse_json(data: bytes) -> Any:
    """JSON by the standard: without NaN and infinity, however spelled, and not nested beyond reason."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    def finite(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else refuse(text[:40])

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no valid JSON ({error})") from error


def read_json(path: Path) -> Any:
    """What a small file says that lies where it claims to be; `OSError` or `Malformed` where it cannot be used."""
    return parse_json(read_untrusted(path, MAX_JSON_BYTES, within=path.parent))


def write_json(path: Path, content: Any) -> None:
    """Put a file in the place of the old one, durably; `ValueError` for what `read_json` would refuse."""
    replace_file(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
