"""Prints every file whose functions one iteration of PPO calls: its code lines, those of the functions, its name.

Feed-forward PPO on `tensor:pendulum` by the definition: the autograd engine, and the plain functions instead of the
kernels that stand for them on some machines. Importing and building are not counted.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

import canter
from canter.core.dispatch import Dispatched
from code_lines import SOURCE, code_lines, lines_of_code


def called_in_an_iteration():
    """First lines of the functions that run in one collection and one update, by file."""
    env = canter.EnvConfig(id="tensor:pendulum", num_envs=8)
    algorithm = canter.PPOConfig(horizon=16, epochs=2, num_minibatches=2)
    execution = canter.ExecutionConfig(engine="autograd", mode="eager")
    programs = canter.Trainer(canter.TrainConfig(env=env, algorithm=algorithm, execution=execution)).programs
    Dispatched.__call__ = lambda function, *args, **kwargs: function.plain(*args, **kwargs)
    called = defaultdict(set)
    sys.settrace(lambda frame, event, _: called[frame.f_code.co_filename].add(frame.f_code.co_firstlineno))
    try:
        programs.update(programs.collect())
    finally:
        sys.settrace(None)
    return {Path(name): lines for name, lines in called.items() if Path(name).is_relative_to(SOURCE)}


def lines_of_functions(path, begins):
    """How many code lines the functions of a file have that begin at these lines."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    spans = [(min([f.lineno, *(d.lineno for d in f.decorator_list)]), f.end_lineno) for f in functions]
    ran = {line for first, last in spans if first in begins for line in range(first, last + 1)}
    return len(ran & lines_of_code(path))


if __name__ == "__main__":
    for path, begins in sorted(called_in_an_iteration().items()):
        print(code_lines(path), lines_of_functions(path, begins), path.relative_to(SOURCE))
