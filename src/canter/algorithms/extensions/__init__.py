"""What can be added to an algorithm by name, in `algorithm.extensions`: one file each, through the four hooks."""

from canter.algorithms.extensions.amp import AMPConfig
from canter.algorithms.extensions.rnd import RNDConfig
from canter.algorithms.extensions.symmetry import MirrorConfig, SymmetryConfig

__all__ = ["AMPConfig", "MirrorConfig", "RNDConfig", "SymmetryConfig"]
