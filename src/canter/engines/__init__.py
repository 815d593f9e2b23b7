"""Ways to compute one description of PPO's loss: by autograd, which is the definition, and by faster means."""
