"""The entry point: what this package adds to Hetero-Megatron."""

from __future__ import annotations

from hetero_megatron.platform.plugins import PluginApi
from hetero_example_vendor.platform import ExampleVendor
from hetero_example_vendor.swiglu import KERNEL

HETERO_PLUGIN_API = 1  # read before anything here is imported


def register(api: PluginApi) -> None:
    """Called once in every process; has no other effects."""
    api.platform(ExampleVendor())
    api.kernel(KERNEL)
