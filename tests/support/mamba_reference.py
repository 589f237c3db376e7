"""transformers' Mamba-2 in the dtype of its inputs: its own text, without the casts to fp32 in it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.models.bamba import modeling_bamba as modeling

from tests.support.qwen_next_reference import exact

_SCOPE = dict(vars(modeling))
scan = exact(inspect.unwrap(modeling.mamba2_chunk_scan), _SCOPE)
exact(inspect.unwrap(modeling.mamba2_selective_state_update), _SCOPE)
_mixer = exact(inspect.unwrap(modeling.BambaMixer.forward), _SCOPE)
_norm = exact(modeling.BambaRMSNormGated.forward, _SCOPE)

MIXERS = ("BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer")
NORMS = ("BambaRMSNormGated", "GraniteMoeHybridRMSNormGated", "NemotronHRMSNormGated", "Zamba2RMSNormGated")


def make_exact_mamba(module: Any, dtype: torch.dtype) -> None:
    """Of one module of a hybrid with Mamba-2 in fp64."""
    if dtype == torch.float64:
        module.forward = (_mixer if type(module).__name__ in MIXERS else _norm).__get__(module)
