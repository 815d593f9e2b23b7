"""Diagnosis of a run: signals, rules that read them, and their findings."""
