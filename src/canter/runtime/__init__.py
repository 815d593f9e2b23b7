"""Loops that bring an environment and an algorithm together."""
