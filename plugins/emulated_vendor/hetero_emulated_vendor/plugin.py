"""The entry point: what this package adds to Hetero-Megatron."""

from __future__ import annotations

from dataclasses import replace

from hetero_emulated_vendor.platform import EmulatedVendor
from hetero_megatron.ops import SPECS, Capability
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1  # read before anything here is imported


def register(api: PluginApi) -> None:
    """Called once in every process; has no other effects."""
    api.platform(EmulatedVendor())
    # Attention by its definition, which no device gets unasked: this one is for small tests.
    definition = reference_kernel(SPECS["attention"])
    only_here = Capability(platforms=(EmulatedVendor.name,))
    api.kernel(replace(definition, provider=EmulatedVendor.name, priority=1, capability=only_here))
