"""Encoding of trees of tensors and plain values: safetensors for tensors, JSON for the rest."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from canter.core.storage.files import Malformed, parse_json

SCHEMA = 1
"""Version of the JSON document; `decode` refuses other versions."""
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 200_000
MAX_DEPTH = 64


def encode(tree: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the tensors and the state of a tree as bytes.

    A tree consists of nested dicts, lists and tuples of tensors, numbers, strings and None. Raises
    TypeError or ValueError for anything that could not be read back exactly.
    """
    if not isinstance(tree, dict):
        raise TypeError(f"a checkpoint is a dict, not {type(tree).__name__}")
    tensors: dict[str, Tensor] = {}
    document = {"schema": SCHEMA, "tree": _encode_node(tree, "", 0, tensors)}
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"{len(tensors)} tensors are more than a checkpoint may hold ({MAX_TENSORS})")
    return safetensors.torch.save(tensors), json.dumps(document, allow_nan=False).encode("ascii")


def decode(tensors: bytes, state: bytes) -> dict[str, Any]:
    """Return the encoded tree, with tensors on the CPU; raise Malformed if it is invalid."""
    unused, _ = parse_tensors(tensors)
    document = parse_json(state)
    if not isinstance(document, dict) or document.keys() != {"schema", "tree"}:
        raise Malformed("the state has other parts than schema and tree")
    if document["schema"] != SCHEMA:
        raise Malformed(f"the state has schema {document['schema']!r}, not {SCHEMA}")
    try:
        tree = _decode_node(document["tree"], 0, unused)
    except (KeyError, ValueError, struct.error) as error:
        raise Malformed(f"the state is malformed ({type(error).__name__}: {error})") from error
    if not isinstance(tree, dict):
        raise Malformed("the state is not a dict")
    if unused:
        raise Malformed(f"there are tensors that the state does not name: {sorted(unused)[:3]}")
    return tree


def _encode_node(node: Any, path: str, depth: int, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for a value: containers, and values that JSON lacks, as lists [kind, content]."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the tree is nested deeper than {MAX_DEPTH} at {path[:200]}")
    match node:
        case None | bool() | str():
            return node
        case int():
            # Other JSON readers may use 64 bits for integers, and Python refuses very long
            # decimals.
            return int(node) if abs(node) < 1 << 63 else ["int", hex(node)]
        case float():
            return float(node) if math.isfinite(node) else ["float", struct.pack(">d", node).hex()]
        case Tensor():
            # Cloned, because safetensors refuses tensors that share memory.
            tensors[path] = node.detach().cpu().contiguous().clone()
            return ["tensor", path]
        case list() | tuple():
            items = [_encode_node(item, f"{path}/{i}", depth + 1, tensors) for i, item in enumerate(node)]
            return ["list" if isinstance(node, list) else "tuple", items]
        case dict():
            wrong = [key for key in node if not isinstance(key, str)]
            if wrong:
                raise TypeError(f"key {wrong[0]!r} at {path or '/'} is not a string")
            return ["dict", {k: _encode_node(v, f"{path}/{_escape(k)}", depth + 1, tensors) for k, v in node.items()}]
    raise TypeError(f"a checkpoint cannot hold {type(node).__name__} (at {path or '/'})")


def _escape(key: str) -> str:
    """Return a key escaped as in JSON pointers, so that different paths have different names."""
    text = key.replace("~", "~0").replace("/", "~1").replace("\\", "~2")
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _decode_node(node: Any, depth: int, tensors: dict[str, Tensor]) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    match node:
        case None | bool() | str() | int() | float():
            return node
        case ["int", str(text)]:
            return int(text, 16)
        case ["float", str(text)]:
            return struct.unpack(">d", bytes.fromhex(text))[0]
        case ["tensor", str(name)]:
            return tensors.pop(name)
        case ["list", list(items)]:
            return [_decode_node(item, depth + 1, tensors) for item in items]
        case ["tuple", list(items)]:
            return tuple(_decode_node(item, depth + 1, tensors) for item in items)
        case ["dict", dict(items)]:
            return {key: _decode_node(item, depth + 1, tensors) for key, item in items.items()}
    raise ValueError(f"an entry of unknown kind: {str(node)[:100]}")


def parse_tensors(data: bytes) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors, on the CPU, and the metadata of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise Malformed(f"the tensors claim a header of {length} bytes in {len(data)} bytes")
    header = parse_json(data[8 : 8 + length])
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise Malformed("the tensors have a malformed header, or too many entries in it")
    try:
        views = safetensors.torch.load(data)
        # Copied, so that every tensor is aligned, writable and independent of the file's bytes.
        tensors = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
        return tensors, header.get("__metadata__")
    except Exception as error:  # safetensors does not document its exceptions for malformed files
        raise Malformed(f"the tensors are malformed ({error})") from error
