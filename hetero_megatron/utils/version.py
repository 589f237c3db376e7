"""The version of the program, which setup.py reads, too."""

__version__ = "0.1.0"
