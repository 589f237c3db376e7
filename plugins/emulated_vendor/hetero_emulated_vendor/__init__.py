"""Hetero-Megatron plugin: an emulated device that finds missing waits."""
