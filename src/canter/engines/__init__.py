"""Engines that compute the losses: autograd, which is the definition, and faster ones."""
