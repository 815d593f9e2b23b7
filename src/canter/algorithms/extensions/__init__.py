"""Extensions that settings name in `algorithm.extensions`."""

from canter.algorithms.extensions.amp import AMPConfig
from canter.algorithms.extensions.rnd import RNDConfig
from canter.algorithms.extensions.symmetry import MirrorConfig, SymmetryConfig

__all__ = ["AMPConfig", "MirrorConfig", "RNDConfig", "SymmetryConfig"]
