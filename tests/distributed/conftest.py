import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def launch(ranks, *command, restarts=0, **how):
    """torchrun with so many ranks on this machine, each with one thread."""
    flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    arguments = [sys.executable, "-m", "torch.distributed.run", *flags, *map(str, command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how
    )


@pytest.fixture(scope="session")
def torchrun():
    """Runs a command under torchrun; gives what it printed, once it has ended as expected."""

    def run(ranks, *command, code=0, restarts=0, **how):
        process = launch(ranks, *command, restarts=restarts, **how)
        out, err = process.communicate(timeout=180)
        assert (process.returncode == 0) == (code == 0), out + err
        return out, err

    return run
