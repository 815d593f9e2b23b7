"""What a Python file says, as syntax: modules, classes and their fields; nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar


class Missing:
    """A field that has to be set by a subclass."""


MISSING = Missing()


Node = TypeVar("Node")


@dataclass
class Found(Generic[Node]):
    """A syntax tree, mostly of a class of settings, and where it was found: names in it mean what they mean there."""

    node: Node
    module: Module
    outer: Class | None = None


Class = Found[ast.ClassDef]


class External(str):
    """The path of something from a module that is not in reach, or that is no setting."""


@dataclass
class Module:
    """One file: what it defines and imports, by name."""

    path: Path
    name: str
    names: dict[str, Any] = field(default_factory=dict)
    """Syntax tree, or (module, name) for what is imported."""
    stars: list[str] = field(default_factory=list)


def is_class(found: Found[Any] | External) -> TypeGuard[Class]:
    """Whether that is a class in reach."""
    return isinstance(found, Found) and isinstance(found.node, ast.ClassDef)


def outwards(scope: Class | None) -> Iterator[Class]:
    """A scope and those around it, from the inside out."""
    while scope is not None:
        yield scope
        scope = scope.outer


def nested(node: ast.ClassDef) -> dict[str, ast.ClassDef]:
    """Classes inside of a class, by name."""
    return {inner.name: inner for inner in node.body if isinstance(inner, ast.ClassDef)}


def method_of(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """A method by its name, if the class has it."""
    return next((inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == name), None)


def fields_of(node: ast.ClassDef) -> dict[str, ast.expr]:
    """What a class sets its fields to, by name."""
    return {name: value for inner in node.body for name, value in assigned(inner).items()}


def assigned(node: ast.stmt) -> dict[str, ast.expr]:
    """What a statement sets a name to, if it does."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return {name: value}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return {name: value}
    return {}


def note(module: Module, node: ast.stmt) -> None:
    """Take note of what a statement defines or imports."""
    module.names |= assigned(node)
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            module.names[name] = node
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


def without_missing(value: Any) -> Any:
    """Plain data without the fields that nobody set."""
    if isinstance(value, dict):
        return {key: without_missing(item) for key, item in value.items() if item is not MISSING}
    return [without_missing(item) for item in value] if isinstance(value, list) else value
