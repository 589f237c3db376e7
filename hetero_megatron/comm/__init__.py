"""Communication between ranks: ragged all-to-all, point-to-point, small vectors; all torch.distributed is here."""

from hetero_megatron.comm.comm import Comm
from hetero_megatron.comm.errors import CommError
from hetero_megatron.comm.group import Group
from hetero_megatron.comm.hooks import Hooks
from hetero_megatron.comm.join import start_comm, stop_comm
from hetero_megatron.comm.work import Handle

__all__ = ["Comm", "CommError", "Group", "Handle", "Hooks", "start_comm", "stop_comm"]
