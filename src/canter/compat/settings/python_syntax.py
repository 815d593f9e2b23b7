"""Syntax of a Python file that is not run: modules, classes and their fields."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar


class Missing:
    """A field that has to be set by a subclass."""


MISSING = Missing()


Node = TypeVar("Node")


@dataclass
class Definition(Generic[Node]):
    """A syntax tree, with the module and class that its names refer to."""

    node: Node
    module: Module
    outer: Class | None = None


Class = Definition[ast.ClassDef]


class External(str):
    """Path of an object in a module that is not in reach, or that is no setting."""


class Unread(str):
    """Error of an expression that has no value unless the file runs, in place of the value."""


@dataclass
class Module:
    """One file: its definitions and imports, by name."""

    path: Path
    name: str
    names: dict[str, Any] = field(default_factory=dict)
    """Syntax tree, or (module, name) for what is imported."""
    stars: list[str] = field(default_factory=list)


def is_class(found: Definition[Any] | External) -> TypeGuard[Class]:
    """Return True for a class in reach."""
    return isinstance(found, Definition) and isinstance(found.node, ast.ClassDef)


def defined(node: ast.stmt) -> dict[str, Any]:
    """Return the syntax tree of the name that a statement defines, if it does."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return {name: value}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return {name: value}
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return {name: node}
    return {}


def members(node: ast.ClassDef) -> dict[str, Any]:
    """Return the syntax trees of a class's fields, methods and inner classes, by name."""
    return {name: value for inner in node.body for name, value in defined(inner).items()}


def note(module: Module, node: ast.stmt) -> None:
    """Add the names that a statement defines or imports to the module."""
    module.names |= defined(node)
    match node:
        case ast.Import(names=aliases):
            for alias in aliases:
                module.names[alias.asname or alias.name.partition(".")[0]] = (alias.name, None)
        case ast.ImportFrom(module=source, names=aliases, level=level):
            where = "." * level + (source or "")
            for alias in aliases:
                if alias.name == "*":
                    module.stars.append(where)
                else:
                    module.names[alias.asname or alias.name] = (where, alias.name)
        case ast.If(body=body) | ast.Try(body=body):
            for inner in body:
                note(module, inner)
        case _:
            pass
