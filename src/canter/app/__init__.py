"""What a user runs: the command line, console, report, environment check and experiments."""
