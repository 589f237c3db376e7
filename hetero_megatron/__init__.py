"""Hetero-Megatron: one language model, trained across whatever accelerators you have."""

__version__ = "0.1.0"
