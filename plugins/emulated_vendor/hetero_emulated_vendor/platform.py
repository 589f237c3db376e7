"""The emulated device as a platform."""

from __future__ import annotations

from typing import Any

import torch

from hetero_emulated_vendor import build
from hetero_megatron.platform import Accelerator


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

    def reach(self) -> str:
        """Ranks of unlike names count as unlike vendors."""
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
