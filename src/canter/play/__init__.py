"""Use of a trained policy: playing, evaluation, videos, viewers and export."""
