"""One run from an environment to a score, as the command line and Python begin it, and many runs."""
