"""The user's side: command line, console, report, environment check and experiments."""
