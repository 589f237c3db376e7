"""The entry point, and what this package adds to Hetero-Megatron: the processor, whose tensors travel through MPI
instead of gloo. Importable where mpi4py is missing."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from hetero_megatron.platform import CPU
from hetero_megatron.platform.plugins import PluginApi

from hetero_mpi_island import BACKEND

HETERO_PLUGIN_API = 1  # read before anything here is imported


class MpiHost(CPU):
    """Ranks that one ``mpiexec`` started. Two MPI worlds cannot reach each other, as two vendors' libraries cannot."""

    name, vendor, adapter, backends = "mpi_host", "mpi", "mpi4py", (BACKEND,)
    library: ClassVar[str] = "mpi"

    def load(self) -> None:
        """Register the backend with torch, and load the MPI library without starting it: every process with this
        plugin does so, those of other platforms too."""
        from hetero_mpi_island import world  # imports mpi4py, which may be missing  # noqa: F401

        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])

    def _here(self) -> bool:
        self.load()
        return True

    def device(self, index: int = 0) -> torch.device:
        """Starts MPI, and waits for the other processes of this MPI world, all of which must ask for their device.

        Raises:
            UserError: the world's processes do not come, or their ranks contradict each other.
        """
        self.load()
        from hetero_mpi_island.world import World

        World.open()
        return super().device(index)

    def reach(self) -> str:
        """The ranks of this MPI world: no other reaches them."""
        from hetero_mpi_island.world import World

        return ",".join(map(str, World.open().ranks))

    def stop(self) -> None:
        """End MPI, where it was started, together with the other processes of this MPI world. For programs that leave
        by ``os._exit``; others do so when they exit."""
        from hetero_mpi_island.world import World

        World.close()


def _create(options: object, backend_options: object = None) -> dist.ProcessGroup:
    from hetero_mpi_island.process_group import create

    return create(options)


def register(api: PluginApi) -> None:
    """Called once in every process; has no other effects."""
    api.platform(MpiHost())
