"""Weights of Megatron-LM's checkpoints (``torch`` and ``torch_dist``), read without executing their pickles."""
