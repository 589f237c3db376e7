"""``pretrain_gpt.py`` whose world is opened by the first backend of its platform, so that every message of the
training goes through that: for test_mpi_island.py."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from hetero_megatron.cli.pretrain import main
from hetero_megatron.platform import Platform, choose_platform
from hetero_megatron.training import loop


def over_its_own(*words: Any) -> Platform:
    platform = choose_platform(*words)
    assert platform.accelerator is not None
    return replace(platform, backend=platform.accelerator.backends[0])


if __name__ == "__main__":
    loop.choose_platform = over_its_own
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
