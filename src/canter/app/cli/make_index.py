"""Writes down what there is to type, see `canter.app.cli.index`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from gymnasium import registry

from canter.app.cli import COMMANDS, Command
from canter.app.cli.index import FILE, gymnasium_ids
from canter.app.cli.listing import summary_of
from canter.app.cli.parser import Parser
from canter.config.presets import presets
from canter.envs.gymnasium.description import NAMESPACES
from canter.envs.schemes import schemes
from canter.envs.tensor import tensor_envs

GYMNASIUM = "gymnasium.envs."
"""Where the environments are that come with Gymnasium itself."""


def make_index() -> dict[str, Any]:
    """The index as the code has it."""
    return {
        "flags": {name: flags_of(command) for name, command in COMMANDS.items()},
        "tensor": {name: summary_of(tensor_envs[name]) for name in tensor_envs},
        "schemes": {name: summary_of(schemes[name]) for name in schemes},
        "presets": [[name, presets[name].env.id, presets[name].total_steps] for name in presets],
        "namespaces": {space: module for space, (module, _) in NAMESPACES.items()},
        "gymnasium": [name for name in gymnasium_ids() if str(registry[name].entry_point).startswith(GYMNASIUM)],
    }


def flags_of(command: Command) -> list[str]:
    """The flags that a command has."""

    def parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
        raise _Seen(sorted(parser.flags))

    own = Parser.parse
    Parser.parse = parse  # pyright: ignore[reportAttributeAccessIssue]
    try:
        command.load()(["."])  # some want a first argument before they read any
    except _Seen as seen:
        return seen.args[0]
    finally:
        Parser.parse = own
    raise AssertionError(f"{command.place} reads no arguments")


class _Seen(Exception):
    """Flags of a parser that was asked to read arguments."""


def text_of(index: dict[str, Any]) -> str:
    """The file's content: one line for each entry, so that changes can be read."""
    return json.dumps(index, indent=0, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text_of(make_index()))
