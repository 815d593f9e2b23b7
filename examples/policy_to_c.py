"""From training to a control loop without torch: CartPole-v1 as a C header, and as a file for NumPy.

    python examples/policy_to_c.py
    gcc -std=c99 -O2 -I. examples/policy.c -o cartpole -lm && ./cartpole

The loop below needs `cartpole.npz`, NumPy and `src/canter/runtime.py`, which may be copied to the robot.
`canter export RUN --to c,numpy` does the same for a run.
"""

import gymnasium

import canter
from canter.runtime import Policy


def play(policy, seed):
    """Return the return of one episode."""
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    policy.reset()
    total = 0.0
    over = False
    while not over:
        (action,) = policy.step(observation)
        observation, reward, terminated, truncated, _ = env.step(int(action))
        total += float(reward)
        over = terminated or truncated
    return total


if __name__ == "__main__":
    result = canter.train("CartPole-v1", total_steps=40_960, console="quiet", final_evaluation=False)
    observations = canter.EnvConfig(id="CartPole-v1").build("cpu").reset(seed=0)  # the files are verified on these
    for format, file in {"c": "cartpole.h", "numpy": "cartpole.npz"}.items():
        canter.export_policy(result.policy, file, format, observations)
    print(f"cartpole.h, cartpole.npz, cartpole.contract.yaml; return {play(Policy('cartpole.npz'), seed=0):.0f}")
