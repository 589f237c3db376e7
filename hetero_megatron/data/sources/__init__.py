"""Kinds of text files. Each module has ``read(path, key, position)``: documents of one file, from a position on.

``position`` is a tuple of integers that means something to that module only; the empty tuple is the beginning.
``read`` yields ``(text, position after it)``, so that a reader can stop anywhere and go on later.
"""
