"""Checkpoints that megatron-core itself writes on CPUs, for tests/slow/test_megatron_core.py.

    torchrun --nproc-per-node TP*PP megatron_core_job.py save TP PP EP FORMAT DIR [latent]  # random weights
    torchrun --nproc-per-node 1 megatron_core_job.py logits 1 1 EP torch_dist DIR [latent]  # DIR/logits.pt of them

EP 0: a dense model; else the expert-parallel size of one with experts. ``latent``: multi-head latent attention, and the
experts of DeepSeek-V3.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any

SIZES = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
}  # fmt: skip
VOCABULARY, POSITIONS = 128, 64
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6, "rope_type": "yarn", "rotary_scaling_factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {"moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_score_function": "softmax"}
DEEPSEEK = {
    "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_score_function": "sigmoid", "moe_router_num_groups": 2,
    "moe_router_group_topk": 1, "moe_router_topk_scaling_factor": 1.5, "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip


def main() -> None:
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]  # megatron-core calls them without a device, too
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    get_cuda_rng_tracker().fork = contextlib.nullcontext  # no dropout
    moe_utils.te_general_gemm = None  # which it does not set without Transformer Engine
    multi_latent_attention.HAVE_TE = False  # it has not
    fused_softmax.get_default_causal_mask = lambda n: torch.ones(n, n).triu(1).bool()
    (tp, pp, ep), (form, folder), what = map(int, sys.argv[2:5]), sys.argv[5:7], sys.argv[1]
    folder = Path(folder)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=max(ep, 1))
    latent = "latent" in sys.argv[7:]
    model = build(tp, pp, ep, latent)
    if what == "logits":
        state = dist_checkpointing.load(model.sharded_state_dict(), str(folder / "iter_0000005"))
        model.load_state_dict(state, strict=False)
        tokens = torch.arange(24).view(2, 12) * 7 % VOCABULARY
        torch.save(model.eval()(tokens, torch.arange(12).expand(2, 12), None), folder / "logits.pt")
        return
    place = parallel_state.get_tensor_model_parallel_rank() + tp * parallel_state.get_pipeline_model_parallel_rank()
    own = torch.Generator().manual_seed(100 + dist.get_rank())
    uncut = torch.Generator().manual_seed(50 + parallel_state.get_pipeline_model_parallel_rank())
    torch.manual_seed(1 + place)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" not in name:  # of which every rank has a copy
                # All else is the same in expert-parallel ranks, and a router in tensor-parallel ones, too.
                generator = own if ".experts." in name else uncut if ".router." in name else None
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):  # large enough to change choices
                buffer.copy_(torch.randn(buffer.shape, generator=uncut) * 0.3)
    save(model, form, folder, parallel_state, ep, latent)


def build(tp: int, pp: int, ep: int, latent: bool) -> Any:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    experts: dict[str, Any] = {
        "num_moe_experts": 4, "moe_router_load_balancing_type": "none", "expert_model_parallel_size": ep,
        "moe_token_dispatcher_type": "allgather", **(DEEPSEEK if latent else EXPERTS),
    }  # fmt: skip
    sizes = SIZES | (LATENT | {"num_query_groups": 4, "layernorm_epsilon": 1e-6} if latent else {})
    if latent and ep:
        experts["moe_layer_freq"] = [0, 1, 1, 1]
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **sizes, **(experts if ep else {}), apply_rope_fusion=False,
        use_cpu_initialization=True, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, add_bias_linear=False, gated_linear_unit=True, qk_layernorm=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    if latent and ep:
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        layers = get_gpt_layer_local_spec(
            4 if ep else None, qk_layernorm=True, normalization="RMSNorm", multi_latent_attention=latent
        )
    for layer in getattr(layers, "layer_specs", []):
        layer.submodules.self_attention.submodules.core_attention = plain_attention()
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    return GPTModel(
        config, layers, VOCABULARY, POSITIONS, first, last, share_embeddings_and_output_weights=False,
        position_embedding_type="rope", rotary_base=10000,
    )  # fmt: skip


def plain_attention() -> type:
    """Megatron-core's own core attention knows heads of one size only, unless Transformer Engine computes it."""
    import torch

    class PlainAttention(torch.nn.Module):
        def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
            super().__init__()
            self.scale = softmax_scale

        def forward(self, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
            """Queries, keys and values [tokens, b, heads, features] -> [tokens, b, heads x features of values]."""
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)

    return PlainAttention


def save(model: Any, form: str, folder: Path, parallel_state: Any, ep: int, latent: bool) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    stored = argparse.Namespace(
        **SIZES, **(LATENT if latent else {}), **(DEEPSEEK if latent else EXPERTS), group_query_attention=not latent,
        kv_channels=8, seq_length=32, max_position_embeddings=POSITIONS,
        position_embedding_type="rope", rotary_base=10000, rotary_percent=1.0, normalization="RMSNorm",
        norm_epsilon=1e-6 if latent else 1e-5, swiglu=True, add_bias_linear=False, add_qkv_bias=False,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=True, vocab_size=None, attention_backend=AttnBackend.flash,
        model_type=ModelType.encoder_or_decoder, params_dtype=torch.float32, num_experts=4 if ep else None,
        moe_layer_freq=[0, 1, 1, 1] if latent else 1,
        expert_model_parallel_size=ep, moe_router_pre_softmax=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )  # fmt: skip
    step = folder / "iter_0000005"
    step.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if form == "torch_dist":
        dist_checkpointing.save(model.sharded_state_dict() | {"args": stored, "iteration": 5}, str(step))
    else:
        t, p = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        e = parallel_state.get_expert_model_parallel_rank()
        rank = step / (f"mp_rank_{t:02d}_{p:03d}" + (f"_{e:03d}" if ep > 1 else ""))
        rank.mkdir()
        state = {"args": stored, "checkpoint_version": 3.0, "model": model.state_dict()}
        torch.save(state, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


if __name__ == "__main__":
    main()
