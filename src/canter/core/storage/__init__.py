"""Files that survive a crash and are safe to read: checkpoints, policies, locks."""
