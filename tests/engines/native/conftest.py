"""Registers the kernels of the CPU, so that each file of this folder can be run alone."""

from canter.engines.native import kernels  # noqa: F401
