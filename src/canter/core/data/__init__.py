"""Buffers between environments and algorithms."""
