"""A recurrent policy: a cue is shown once, and three blank steps later the policy must repeat it.

    python examples/recurrent.py

Pass `state` to the next `predict` while an episode lasts, and None when a new one begins. For a larger task:
`canter train --preset cartpole-positions-lstm`, a pole to balance without seeing any velocity.
"""

import canter

CUE_LEFT, CUE_RIGHT, BLANK, QUESTION = [-1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]

if __name__ == "__main__":
    network = canter.NetworkConfig(hidden=(16,), rnn=canter.RNNConfig(cell="gru", hidden=16))
    ppo = canter.PPOConfig(
        horizon=10,
        sequence_length=5,  # steps of backpropagation through time
        num_minibatches=1,
        epochs=4,
        optimizer=canter.OptimizerConfig(learning_rate=canter.Linear(1e-2)),
        model=canter.ModelConfig(policy=network),
    )
    result = canter.train("tensor:probe-recall", num_envs=32, algorithm=ppo, total_steps=12_800)

    for cue in (CUE_LEFT, CUE_RIGHT):
        state = None
        for observation in (cue, BLANK, BLANK, BLANK, QUESTION):
            action, state = result.predict(observation, state)
        print(f"the cue was {cue[0]:+.0f}, the answer is {('-1', '+1')[action]}")
