"""Megatron's parallel flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronParallel:
    """Megatron's parallel flags, named like them; ``world_size`` is the number of ranks that were started."""

    world_size: int
    seq_length: int
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    cp_comm_type: Sequence[str] = ("p2p",)
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None  # as tensor parallel
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_activations: bool = False
    use_tp_pp_dp_mapping: bool = False
    schedule: str | None = None  # interleaved where there are virtual stages, else 1f1b
