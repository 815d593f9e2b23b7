"""What is wrong with a run: signals, rules that read them, and their findings."""
