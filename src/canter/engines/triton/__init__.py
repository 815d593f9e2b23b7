"""Engines for a GPU: whole networks in one launch, or layer by layer."""
