"""Syntax of a Python file that is not run: modules, classes and their fields."""

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


def outwards(scope: Class | None) -> Iterator[Class]:
    """Yield a scope and those around it, from the inside out."""
    while scope is not None:
        yield scope
        scope = scope.outer


def nested(node: ast.ClassDef) -> dict[str, ast.ClassDef]:
    """Return the classes inside a class, by name."""
    return {inner.name: inner for inner in node.body if isinstance(inner, ast.ClassDef)}


def method_of(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return a method by its name, or None."""
    return next((inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == name), None)


def fields_of(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the values of a class's fields, by name."""
    return {name: value for inner in node.body for name, value in assigned(inner).items()}


def assigned(node: ast.stmt) -> dict[str, ast.expr]:
    """Return the value that a statement assigns to a name, if it does."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return {name: value}
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return {name: value}
    return {}


def note(module: Module, node: ast.stmt) -> None:
    """Add the names that a statement defines or imports to the module."""
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
    """Return plain data without unset fields."""
    if isinstance(value, dict):
        return {key: without_missing(item) for key, item in value.items() if item is not MISSING}
    return [without_missing(item) for item in value] if isinstance(value, list) else value
