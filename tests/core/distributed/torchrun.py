"""Commands under torchrun, on this machine."""

import os
import subprocess
import sys


def launch(ranks, *command, restarts=0, **how):
    """Return a command for a number of ranks, each with one thread."""
    flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    arguments = [sys.executable, "-m", "torch.distributed.run", *flags, *map(str, command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how
    )


def torchrun(ranks, *command, fails=False, **how):
    """Return the output and the errors of a command that ended as expected."""
    process = launch(ranks, *command, **how)
    out, err = process.communicate(timeout=300)
    assert (process.returncode != 0) == fails, out + err
    return out, err
