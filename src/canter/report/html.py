"""HTML and SVG as nested calls; whatever is no markup already is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_VOID = frozenset({"meta", "br", "img", "rect", "line", "path", "circle"})
"""Elements without content, written `<br/>`, which is right in HTML and in SVG."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(content: object) -> Markup:
    """Content as markup: names of runs and values of settings may hold anything."""
    if isinstance(content, Markup):
        return content
    # Names of files may hold bytes that are no text.
    text = str(content).encode("utf-8", "replace").decode()
    return Markup(html.escape(_CONTROL.sub("\ufffd", text)))


def joined(children: Iterable[object]) -> Markup:
    """Markup of all children, one after the other; None is nothing."""
    return Markup("".join(escaped(child) for child in children if child is not None))


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element; `class_` is written `class`, `stroke_width` is `stroke-width`, None leaves an attribute out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = name + "".join(f' {key}="{_attribute(value)}"' for key, value in given.items())
    return Markup(f"<{head}/>" if name in _VOID else f"<{head}>{joined(children)}</{name}>")


def _attribute(value: object) -> Markup:
    # A tenth of a pixel is enough, and pages stay small.
    return Markup(f"{value:.1f}".removesuffix(".0")) if isinstance(value, float) else escaped(value)
