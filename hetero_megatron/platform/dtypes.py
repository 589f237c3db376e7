"""Dtypes of weights and activations, by the names that flags, plans and checkpoints use."""

import torch

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
