"""A platform for checking others: the CPU, on which only the definitions of the operators run."""

from __future__ import annotations

from hetero_megatron.platform import CPU
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1


class Reference(CPU):
    """``--platform reference --kernels reference``: every operator by its definition."""

    name = "reference"


def register(api: PluginApi) -> None:
    api.platform(Reference())
