"""Being here, it lets tests of every folder import the helpers that lie beside it."""

import os
import tempfile

# Runs that may import something are signed with a secret of the user's, which tests have no business with.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="canter-tests-")
