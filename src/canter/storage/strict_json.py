"""JSON from files that anybody may have written."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


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
