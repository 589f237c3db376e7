"""The emulated device as a platform."""

from __future__ import annotations

import torch

from hetero_emulated_vendor import build
from hetero_megatron.platform import Accelerator


class EmulatedVendor(Accelerator):
    """Chosen by ``--platform emulated_vendor`` only: it stands in for an accelerator, and no run wants it unasked."""

    name, vendor, device_type = "emulated_vendor", "emulated", "emu"
    adapter = "hetero_emulated_vendor.adapter"
    backends = ("emuccl",)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    automatic = False
    tested = True

    def reach(self) -> str:
        """Ranks of unlike names count as unlike vendors."""
        self.load()
        from hetero_emulated_vendor.extension import vendor

        return vendor()

    def absence(self) -> str:
        return super().absence() if build.built() else f"its extension is not built: {build.COMMAND}"
