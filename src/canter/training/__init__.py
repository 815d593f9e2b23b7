"""The main loop and its living parts."""
