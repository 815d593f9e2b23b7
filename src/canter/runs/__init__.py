"""The files of a run, and writers of its metrics."""
