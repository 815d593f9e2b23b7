"""Being here, it lets tests of every folder import the helpers that lie beside it."""

import atexit
import os
import shutil
import tempfile

import pytest

from canter.envs import imports

# Runs that may import something are signed with a secret of the user's, which tests have no business with.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="canter-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def trust_ends_with_the_test(monkeypatch):
    """What a test allows to be imported is not allowed in the next."""
    monkeypatch.setattr(imports, "_allowed", imports.allowed_imports())
    monkeypatch.setattr(imports, "_introduced", {})
