"""Define the directive `config-reference`: every setting with its docstring, from the config dataclasses.

A field without a docstring is a warning, and a warning fails the build.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin
from typing import get_type_hints as plain_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.logging import getLogger

from canter.config import TrainConfig
from canter.config.files import field_docs
from canter.core.hints import config_classes, registry_in
from canter.core.plain import to_plain

logger = getLogger(__name__)

WORDS = {bool: "`true` or `false`", int: "an integer", float: "a number", str: "a string", types.NoneType: "`null`"}
PLURALS = {int: "integers", float: "numbers", str: "strings"}


@dataclass(frozen=True)
class Section:
    """A config class and the key paths that lead to it; the empty path is the top."""

    cls: type
    paths: list[str]


def sections(root: type) -> list[Section]:
    """Return the config classes reachable from `root`, each once, in order of first appearance."""
    found: dict[type, dict[str, None]] = {}

    def visit(cls: type, path: str) -> None:
        found.setdefault(cls, {})[path] = None
        for name, hint in get_type_hints(cls).items():
            one = get_args(hint)[0] if get_origin(hint) is tuple else hint
            registry = registry_in(one)
            usual = registry and registry.items().get(registry.default or "")
            for inner in sorted(config_classes(one), key=lambda kind: kind is not usual):  # the default kind first
                visit(inner, join(path, name))

    visit(root, "")
    return [Section(cls, list(paths)) for cls, paths in found.items()]


def page(root: type) -> Iterator[str]:
    """Yield the reference as lines of Markdown."""
    for section in sections(root):
        cls, first = section.cls, section.paths[0]
        yield from (f"({anchor(cls)})=", f"## {cls.__name__}", "", inspect.cleandoc(cls.__doc__ or ""), "")
        if first:
            yield from (f"Path: {', '.join(f'`{path}`' for path in section.paths)}.", "")
        for field in fields(cls):
            doc = field_docs(cls).get(field.name, "")
            if not doc:
                logger.warning("%s.%s has no docstring", cls.__name__, field.name)
            kind = describe(get_type_hints(cls)[field.name])
            yield from (f"`{join(first, field.name)}`", f": {doc}", "", f"  *{kind}*{default(field)}", "")


def describe(hint: Any) -> str:
    """Return a type hint in the words of a YAML reader; config classes are links."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in inner)
    registry = registry_in(hint)
    if registry is not None:
        links = [f"`{kind}` ([{cls.__name__}](#{anchor(cls)}))" for kind, cls in named_classes(hint)]
        return (
            " or ".join(links)
            or f"the name of a {registry.kind}: {' or '.join(f'`{name}`' for name in registry.items())}"
        )
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        return f"a list of {plural(inner[0])}"
    if origin is dict:
        return "a mapping"
    return f"[{hint.__name__}](#{anchor(hint)})" if is_dataclass(hint) else WORDS[hint]


def plural(hint: Any) -> str:
    """Return the plural for the members of a list."""
    registry = registry_in(hint)
    if registry is not None:
        return f"{registry.kind}s, each {describe(hint)}"
    if is_dataclass(hint):
        return describe(hint)
    return f"lists of {plural(get_args(hint)[0])}" if get_origin(hint) is tuple else PLURALS[hint]


def default(field: Field[Any]) -> str:
    """Return the default of a field; empty for a section, whose fields have their own defaults."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is MISSING:
        return "; required"
    if is_dataclass(value):
        plain = list(to_plain(value).values())
        return f"; default `{plain[0]}`" if len(plain) == 1 else ""
    if value == {}:
        return "; empty by default"
    return f"; default `{value if isinstance(value, str) else json.dumps(value)}`"


def named_classes(hint: Any) -> list[tuple[str, type]]:
    """Return the kinds that a field accepts, with their classes."""
    registry = registry_in(hint)
    return [(registry.name_of(cls) or "", cls) for cls in config_classes(hint)] if registry else []


def get_type_hints(cls: type) -> dict[str, Any]:
    """Return type hints with the registries of open fields."""
    return plain_hints(cls, include_extras=True)


def anchor(cls: type) -> str:
    return f"config-{cls.__name__.lower()}"


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class ConfigReference(SphinxDirective):
    """Insert the reference in place of the directive."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(page(TrainConfig)), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("config-reference", ConfigReference)
    # Sphinx may read pages in parallel.
    return {"parallel_read_safe": True}
