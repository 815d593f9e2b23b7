"""Pictures of environments in the plane, by numpy alone.

K points, H x W pixels.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

Colour = tuple[int, int, int]
WHITE, GREY, BLACK = (255, 255, 255), (225, 228, 232), (40, 44, 52)
BLUE, RED, GREEN = (52, 101, 164), (204, 60, 50), (60, 160, 90)


class Picture:
    """A window on the plane around `centre`, `span` units wide; y points up."""

    def __init__(self, centre: tuple[float, float], span: float, width: int = 480, height: int = 320) -> None:
        self.pixel = span / width
        x = centre[0] + (np.arange(width) + 0.5 - width / 2) * self.pixel
        y = centre[1] - (np.arange(height) + 0.5 - height / 2) * self.pixel
        self.x, self.y = x[None, :], y[:, None]
        self.image = np.full((height, width, 3), WHITE, dtype=np.float64)

    def line(self, points: np.ndarray, thickness: float, colour: Colour) -> None:
        """Straight pieces from each of the points `[K, 2]` to the next, with round ends."""
        distances = [self._distance(start, end) for start, end in pairwise(points)]
        self._fill(np.minimum.reduce(distances), thickness / 2, colour)

    def disc(self, point: np.ndarray, radius: float, colour: Colour) -> None:
        """A filled circle."""
        self._fill(self._distance(point, point), radius, colour)

    def box(self, low: tuple[float, float], high: tuple[float, float], colour: Colour) -> None:
        """A filled rectangle."""
        inside = (self.x >= low[0]) & (self.x <= high[0]) & (self.y >= low[1]) & (self.y <= high[1])
        self.image[inside] = colour

    def grid(self, step: float, colour: Colour = GREY) -> None:
        """Lines at all multiples of `step`, to see movement by."""
        for axis in (self.x, self.y):
            near = np.abs((axis + step / 2) % step - step / 2) < 0.6 * self.pixel
            self.image[np.broadcast_to(near, self.image.shape[:2])] = colour

    def pixels(self) -> np.ndarray:
        """`[H, W, 3]` uint8."""
        return self.image.round().astype(np.uint8)

    def _distance(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Of every pixel `[H, W]` from a piece of a line."""
        along = end - start
        length2 = float(along @ along)
        share = ((self.x - start[0]) * along[0] + (self.y - start[1]) * along[1]) / (length2 or 1.0)
        share = np.clip(share, 0.0, 1.0)
        return np.hypot(self.x - start[0] - share * along[0], self.y - start[1] - share * along[1])

    def _fill(self, distance: np.ndarray, radius: float, colour: Colour) -> None:
        # A pixel at the edge is covered in part.
        cover = np.clip((radius - distance) / self.pixel + 0.5, 0.0, 1.0)[..., None]
        self.image = (1 - cover) * self.image + cover * np.array(colour)
