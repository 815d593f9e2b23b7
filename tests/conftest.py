"""Being here, it lets tests of every folder import the helpers that lie beside it."""

import pytest

from canter.envs import imports


@pytest.fixture(autouse=True)
def trust_ends_with_the_test(monkeypatch):
    """What a test allows to be imported is not allowed in the next."""
    monkeypatch.setattr(imports, "_allowed", set(imports.allowed_imports()))
