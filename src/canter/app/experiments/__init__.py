"""Experiments: runs and sweeps, as the command line and Python programs carry them out."""
