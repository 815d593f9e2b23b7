"""Print the reading path: every file whose functions run from `canter.train` to the end of the first iteration.

    python tests/reading_path.py               the path of canter.train("CartPole-v1")
    python tests/reading_path.py iteration     one collection and one update alone

Each line has the file's code lines, those of the functions that were called, and its name. Training
runs by the definition: the autograd engine, and plain functions instead of their kernels. Imports
and the report at the end are not counted.
"""

import ast
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import canter
from canter.core.dispatch import Dispatched
from code_lines import SOURCE, code_lines, lines_of_code


class FirstIterationDone(BaseException):
    """Ends the trace."""


def trace(function):
    """Return the first lines of the functions that `function` calls, by file."""
    called = defaultdict(set)
    sys.settrace(lambda frame, event, _: called[frame.f_code.co_filename].add(frame.f_code.co_firstlineno))
    try:
        function()
    except FirstIterationDone:
        pass
    finally:
        sys.settrace(None)
    return {Path(name): lines for name, lines in called.items() if Path(name).is_relative_to(SOURCE)}


def train_one_iteration():
    """Return a function that trains CartPole-v1 as a user does, up to the first row of the log."""

    def stop(report):
        raise FirstIterationDone

    def train():
        with tempfile.TemporaryDirectory() as folder:
            canter.train("CartPole-v1", stop, execution=execution, run_dir=folder, console="quiet")

    execution = canter.ExecutionConfig(engine="autograd")
    return train


def one_iteration():
    """Return a function that collects one rollout of `tensor:pendulum` and learns from it."""
    env = canter.EnvConfig(id="tensor:pendulum", num_envs=8)
    algorithm = canter.PPOConfig(horizon=16, epochs=2, num_minibatches=2)
    execution = canter.ExecutionConfig(engine="autograd", mode="eager")
    trainer = canter.Trainer(canter.TrainConfig(env=env, algorithm=algorithm, execution=execution))
    # The trainer is kept: collecting it as garbage would close its environment within the trace.
    return lambda: trainer.programs.update(trainer.programs.collect())


def lines_of_functions(path, begins):
    """Return the number of code lines in the functions of a file that begin at these lines."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    spans = [(min([f.lineno, *(d.lineno for d in f.decorator_list)]), f.end_lineno) for f in functions]
    ran = {line for first, last in spans if first in begins for line in range(first, last + 1)}
    return len(ran & lines_of_code(path))


if __name__ == "__main__":
    run = one_iteration() if sys.argv[1:] == ["iteration"] else train_one_iteration()
    Dispatched.__call__ = lambda function, *args, **kwargs: function.plain(*args, **kwargs)
    for path, begins in sorted(trace(run).items()):
        print(code_lines(path), lines_of_functions(path, begins), path.relative_to(SOURCE))
