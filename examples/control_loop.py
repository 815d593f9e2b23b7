"""A policy in a control loop: load it once, then `predict` takes and returns plain NumPy.

    python examples/control_loop.py                  # trains a small policy first
    python examples/control_loop.py runs/latest      # or an existing run or policy file

One file is enough: it holds weights, statistics and the observation and action spaces, and no code.
"""

import sys
import time

import gymnasium

import canter

if __name__ == "__main__":
    if len(sys.argv) > 1:
        policy = canter.load(sys.argv[1])
    else:
        result = canter.train("CartPole-v1", total_steps=8192, console="quiet", final_evaluation=False)
        result.policy.save("cartpole.safetensors")
        policy = canter.load("cartpole.safetensors")

    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    state, steps, over, start = None, 0, False, time.perf_counter()
    while not over:
        action, state = policy.predict(observation, state)  # the state is a recurrent policy's memory, else ()
        observation, _, terminated, truncated, _ = env.step(action)
        steps, over = steps + 1, terminated or truncated
    print(f"balanced for {steps} steps, {1e6 * (time.perf_counter() - start) / steps:.0f} microseconds each")
