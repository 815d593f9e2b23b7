"""What every other package builds on: contracts, plain data, storage, ranks and rollout data."""
