"""The device a rank computes on, behind one small interface, and the plugins that know devices."""

from hetero_megatron.platform.accelerator import CPU, Accelerator, Limits
from hetero_megatron.platform.platform import Platform, choose_platform, detect_platform

__all__ = ["CPU", "Accelerator", "Limits", "Platform", "choose_platform", "detect_platform"]
