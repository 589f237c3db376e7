"""Tuning tables as data: one file per architecture, and generic.json."""
