"""Self-play: rock, paper, scissors, learned against earlier versions of the policy.

    python examples/self_play.py

No pure strategy is best, so the policy keeps chasing the answer to its own past. The average of all versions approaches
the equilibrium, a third of each move.
"""

import numpy as np

import canter

MOVES = ("rock", "paper", "scissors")
played = []


def remember(report, policy):
    """How often the policy plays each move now."""
    moves, _ = policy.predict(np.zeros((1000, *policy.spec.obs["policy"].shape)), deterministic=False)
    played.append(np.bincount(moves, minlength=3) / 1000)


if __name__ == "__main__":
    # The preset has `self_play: {snapshot_every: 1, ...}`: after every iteration the policy joins its own opponents.
    canter.train("tensor:rps", remember, total_steps=50_000, console="quiet", final_evaluation=False)
    for what, shares in {"the last policy": played[-1], "all of them": np.mean(played, axis=0)}.items():
        print(f"{what:<16}", "  ".join(f"{move} {share:.2f}" for move, share in zip(MOVES, shares, strict=True)))
