"""A look at environment and settings before training starts."""
