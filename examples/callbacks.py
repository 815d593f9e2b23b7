"""Callbacks: watch a run while it trains, and stop it early.

    python examples/callbacks.py

Most uses of callbacks are settings already, here `evaluate` and `checkpoints`; the command line has them too:
`canter train CartPole-v1 --evaluate.every 4096 --until.mean-return 100`.
"""

import canter

LEANING_RIGHT = [0.0, 0.0, 0.05, 0.0]


def watch(report, policy, trainer):
    """Called with every row of the log; a function of fewer arguments gets only the first ones."""
    push = ("left", "right")[policy.predict(LEANING_RIGHT)[0]]
    print(f"{report.env_steps:>6,} steps  return {report.return_:5.1f}  a pole that leans right is pushed {push}")
    return canter.STOP if report.return_ > 100 else None  # False ends the run too


if __name__ == "__main__":
    result = canter.train(
        "CartPole-v1",
        watch,
        total_steps=50_000,
        evaluate={"every": 4096, "episodes": 5},  # a separate curve, `eval/return`, in environments of its own
        checkpoints={"best_by": "evaluation"},  # `canter.load` returns the best policy by that curve
        console="quiet",
        final_evaluation=False,
    )
    print(f"ended by {result.ended_by}; the best policy is in {result.path / 'policies'}")
