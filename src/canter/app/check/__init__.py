"""The environment check: problems of an environment and its settings, found before training."""
