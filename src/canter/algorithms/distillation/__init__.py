"""Distillation: a student learns what a teacher does."""

from canter.algorithms.distillation.distillation import Distillation, DistillationConfig

__all__ = ["Distillation", "DistillationConfig"]
