"""Communication between ranks: ragged all-to-all, point-to-point, small vectors; all torch.distributed is here."""

from hetero_megatron.comm.comm import Comm
from hetero_megatron.comm.group import Group
from hetero_megatron.comm.hooks import Hooks
from hetero_megatron.comm.rendezvous import start_comm, stop_comm, world_group
from hetero_megatron.comm.work import CommError, Work

__all__ = ["Comm", "CommError", "Group", "Work", "Hooks", "start_comm", "stop_comm", "world_group"]
