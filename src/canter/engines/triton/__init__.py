"""Engines for a GPU: whole networks in one launch where they fit on the chip, else layer by layer."""
