"""Modules that hold parameters: encoders, normalisers, heads and the models made of them."""
