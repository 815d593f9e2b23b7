"""What can be added to an algorithm by name, in `algorithm.extensions`: one file each, through the four hooks."""

from canter.extensions.amp import AMPConfig
from canter.extensions.rnd import RNDConfig
from canter.extensions.symmetry import MirrorConfig, SymmetryConfig

__all__ = ["AMPConfig", "MirrorConfig", "RNDConfig", "SymmetryConfig"]
