"""What made NaN or infinity: the last iteration of a run, played again step by step."""
