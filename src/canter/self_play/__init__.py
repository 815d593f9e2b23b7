"""Learning a game of two against past policies."""
