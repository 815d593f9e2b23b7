"""What a run leaves on disk and where its metrics go."""
