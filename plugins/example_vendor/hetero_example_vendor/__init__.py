"""Hetero-Megatron plugin for example_vendor devices."""
