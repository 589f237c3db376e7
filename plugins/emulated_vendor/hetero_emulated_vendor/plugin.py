"""The entry point, and what this package adds to Hetero-Megatron: the emulated device as a platform, and attention by
its definition on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hetero_emulated_vendor import build
from hetero_megatron.ops import SPECS, Capability
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.platform import Accelerator
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1  # read before anything here is imported


class EmulatedVendor(Accelerator):
    """Chosen by ``--platform emulated_vendor`` only: it stands in for an accelerator, and no run wants it unasked."""

    name, vendor, device_type = "emulated_vendor", "emulated", "emu"
    adapter = "hetero_emulated_vendor.adapter"
    backends = ("emuccl",)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    visible = ("HETERO_EMULATED_VISIBLE",)
    eager_settings = {"HETERO_EMULATED_LOADING": "EAGER"}
    automatic = False
    tested = True
    aborts = True

    def reach(self) -> str:
        """Ranks of unlike names (``HETERO_EMULATED_VENDOR``) count as unlike vendors: only the bridge joins
        them."""
        self.load()
        from hetero_emulated_vendor.extension import vendor

        return vendor()

    def message_options(self) -> Any:
        from hetero_emulated_vendor.adapter import Options

        return Options(max_ctas=4)

    def library_version(self) -> str:
        from hetero_emulated_vendor.extension import version

        return version()

    def absence(self) -> str:
        return super().absence() if build.built() else f"its extension is not built: {build.COMMAND}"


def register(api: PluginApi) -> None:
    """Called once in every process; has no other effects."""
    api.platform(EmulatedVendor())
    # Attention by its definition, which no device gets unasked: this one is for small tests.
    definition = reference_kernel(SPECS["attention"])
    only_here = Capability(platforms=(EmulatedVendor.name,))
    api.kernel(replace(definition, provider=EmulatedVendor.name, priority=1, capability=only_here))
