"""The compiled extension, loaded; and the vendor that this process says to be of."""

from __future__ import annotations

import os

from hetero_emulated_vendor import build

VENDOR = "HETERO_EMULATED_VENDOR"  # environment variable: ranks of unlike names cannot talk by emuccl

extension = build.load()


def vendor() -> str:
    return os.environ.get(VENDOR) or "emulated"
