"""Export: the policy as one ONNX file, run by onnxruntime and NumPy alone, as on a robot without Canter.

    python examples/export_onnx.py

Normalisation, recurrent state and bounds are inside the file; its metadata describes inputs and outputs.
`canter export RUN` does the same for a run. Needs `pip install "canter[onnx]"`.
"""

import json

import gymnasium
import numpy as np
import onnxruntime

import canter


def play(path, seed):
    """The return of one episode by the file."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = next(iter(json.loads(session.get_modelmeta().custom_metadata_map["canter"])["inputs"]))
    env, total, over = gymnasium.make("CartPole-v1"), 0.0, False
    observation, _ = env.reset(seed=seed)
    while not over:
        action = session.run(None, {name: observation[None].astype(np.float32)})[0][0]
        observation, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


if __name__ == "__main__":
    result = canter.train("CartPole-v1", total_steps=8192, console="quiet", final_evaluation=False)
    observations = canter.EnvConfig(id="CartPole-v1").build("cpu").reset(seed=0)
    made = canter.export_policy(result.policy, "cartpole.onnx", "onnx", observations)  # verified on these
    print(f"{made.path}: at most {made.max_difference:.0e} from the policy; return {play('cartpole.onnx', 0):.0f}")
