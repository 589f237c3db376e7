"""Imported once by the process that ranks are forked from: what jobs import takes each rank seconds."""

import gc

import torch._dynamo  # optimizers import it on first use
import torch.distributed  # noqa: F401

import hetero_megatron.training.train  # noqa: F401
import tests.support.parity  # noqa: F401

gc.freeze()  # ranks share these pages: no garbage collection writes to them
