"""`canter doctor`: what is wrong with a run, what to change, and whether the change helps."""
