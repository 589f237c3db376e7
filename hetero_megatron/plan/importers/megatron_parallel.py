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
    use_torch_fsdp2: bool = False
    torch_fsdp2_no_reshard_after_forward: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str | None = None  # of --use-megatron-fsdp
    schedule: str | None = None  # interleaved where there are virtual stages, else 1f1b

    @property
    def gather_weights(self) -> str | None:
        """For how long weights are whole that replicas divide, as a plan's ``weights`` has it; None: each has them all.
        Gradients alone (``optim_grads``) are those of weights that are gathered once a step."""
        if self.use_torch_fsdp2:
            return "layer"
        strategies = {"optim_grads": "step", "optim_grads_params": "layer"}
        return strategies.get(self.data_parallel_sharding_strategy or "") if self.use_megatron_fsdp else None
