"""The main loop and its parts."""
