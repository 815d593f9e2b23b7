"""Pure functions of tensors: returns and advantages, losses, statistics."""
