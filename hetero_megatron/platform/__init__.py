"""The device a rank computes on, behind one small interface."""

from hetero_megatron.platform.platform import Platform, detect_platform

__all__ = ["Platform", "detect_platform"]
