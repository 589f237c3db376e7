"""Communication between ranks: ragged all-to-all, point-to-point, small vectors; all torch.distributed is here."""

from hetero_megatron.comm.comm import Comm, Group, Handle, start_comm, stop_comm
from hetero_megatron.comm.errors import CommError

__all__ = ["Comm", "CommError", "Group", "Handle", "start_comm", "stop_comm"]
