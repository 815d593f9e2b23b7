"""The base of all packages: specs, registries, plain settings, storage, ranks, rollout buffers."""
