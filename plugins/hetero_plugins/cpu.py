"""The CPU with gloo. Its fast kernels are aten's, which the core brings along."""

from __future__ import annotations

from hetero_megatron.platform import CPU
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1


def register(api: PluginApi) -> None:
    api.platform(CPU())
