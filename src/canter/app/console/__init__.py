"""How a run is shown on a terminal."""
