import importlib
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from canter.config import TrainConfig
from canter.core.hints import config_keys

EXTENSIONS = Path(__file__).parents[2] / "docs" / "_ext"


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(EXTENSIONS)
    return importlib.import_module("config_reference")


@dataclass(frozen=True)
class Toy:
    """A toy."""

    size: int = 3
    """How large
    it is."""
    silent: bool = True


def test_every_key_is_listed_with_its_docstring(reference):
    sections = reference.sections(TrainConfig)
    for key in config_keys(TrainConfig):
        path, _, name = key.rpartition(".")
        docs = [reference.field_docs(section.cls).get(name) for section in sections if path in section.paths]
        # `kind` is not a field: it chooses among the classes under one path.
        assert any(docs) or (name == "kind" and docs), key


def test_a_field_is_written_with_type_default_and_docstring(reference):
    text = "\n".join(reference.page(TrainConfig))
    assert "`algorithm.gae_lambda`\n: Bias-variance trade-off" in text
    assert "*a number*; default `0.95`" in text
    assert "*a list of integers*; default `[64, 64]`" in text
    assert "*`step` or `time`*; default `step`" in text
    names = {"standard": "NetworkConfig", "module": "ModuleConfig", "stack": "StackNetworkConfig"}
    kinds = " or ".join(f"`{kind}` ([{name}](#config-{name.lower()}))" for kind, name in names.items())
    assert f"*{kinds} or `null`*; default `null`" in text


def test_a_field_without_docstring_is_a_warning(reference, caplog):
    with caplog.at_level(logging.WARNING):
        text = "\n".join(reference.page(Toy))
    assert ": How large it is.\n\n  *an integer*; default `3`" in text
    assert "Toy.silent has no docstring" in caplog.text
