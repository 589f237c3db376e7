"""The entry point: what this package adds to Hetero-Megatron."""

from __future__ import annotations

from hetero_megatron.platform.plugins import PluginApi

from hetero_mpi_island.platform import MpiHost

HETERO_PLUGIN_API = 1  # read before anything here is imported


def register(api: PluginApi) -> None:
    """Called once in every process; has no other effects."""
    api.platform(MpiHost())
