"""The compiled extension, loaded; and the vendor that this process says to be of."""

from __future__ import annotations

import atexit
import datetime
import os

from hetero_emulated_vendor import build

VENDOR = "HETERO_EMULATED_VENDOR"  # environment variable: ranks of unlike names cannot talk by emuccl

extension = build.load()
# Streams and backward passes run on threads of their own, which the end of the interpreter would cut off.
atexit.register(extension.settle_before_exit, datetime.timedelta(seconds=5))


def vendor() -> str:
    return os.environ.get(VENDOR) or "emulated"
