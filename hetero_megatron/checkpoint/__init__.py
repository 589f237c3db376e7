"""Checkpoints: the native distributed format, and model weights in Hugging Face formats."""
