"""Search of settings: `canter tune` and `canter.tune`."""
