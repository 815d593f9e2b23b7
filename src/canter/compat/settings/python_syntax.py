"""What a Python file says, as syntax: modules, classes and their fields; nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Missing:
    """A field that has to be set by a subclass."""


MISSING = Missing()


@dataclass
class Class:
    """A class of settings: its own fields with their syntax trees, and the scope in which they are read."""

    name: str
    node: ast.ClassDef
    module: Module
    outer: Class | None = None


@dataclass(frozen=True)
class External:
    """Something from a module that is not in reach, or that is no setting."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass
class Module:
    """One file: what it defines and imports, by name."""

    path: Path
    name: str
    names: dict[str, Any] = field(default_factory=dict)
    """Syntax tree, or (module, name) for what is imported."""
    stars: list[str] = field(default_factory=list)


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
    fields: dict[str, ast.expr] = {}
    for inner in node.body:
        match inner:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                fields[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                fields[name] = value
            case _:
                pass
    return fields


def without_missing(value: Any) -> Any:
    """Plain data without the fields that nobody set."""
    if isinstance(value, dict):
        return {key: without_missing(item) for key, item in value.items() if item is not MISSING}
    return [without_missing(item) for item in value] if isinstance(value, list) else value
