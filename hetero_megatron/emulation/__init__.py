"""What a rank of a testbed does to be a slower chip with slower links; hooks into comm through ``comm.hooks``."""

from hetero_megatron.emulation.rank import Emulation

__all__ = ["Emulation"]
