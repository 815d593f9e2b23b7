"""Pure functions of tensors: returns and advantages, losses, densities, statistics, Adam."""
