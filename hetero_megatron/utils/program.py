"""What the program is and ends with: its version, which setup.py reads, too, and its exit codes."""

__version__ = "0.1.0"
INTERRUPTED = 130  # exit code: Ctrl-C ended it
