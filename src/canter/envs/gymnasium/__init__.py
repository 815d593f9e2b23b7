"""Gymnasium environments: one or many, in this process or in workers."""
