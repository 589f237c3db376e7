"""Exit codes of the program."""

INTERRUPTED = 130  # Ctrl-C ended it
