"""The compiled extension, loaded; and the vendor that this process says to be of."""

from __future__ import annotations

import atexit
import datetime
import os

from hetero_emulated_vendor import build

VERSION = "HETERO_EMULATED_VERSION"  # environment variable: of emuccl; ranks of unlike ones cannot talk either
VENDOR = "HETERO_EMULATED_VENDOR"  # environment variable: ranks of unlike names cannot talk by emuccl

extension = build.load()
# Streams and backward passes run on threads of their own, which the end of the interpreter would cut off.
atexit.register(extension.settle_before_exit, datetime.timedelta(seconds=5))


def vendor() -> str:
    return os.environ.get(VENDOR) or "emulated"


def version() -> str:
    return os.environ.get(VERSION, "")
