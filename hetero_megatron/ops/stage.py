"""Which operators a stage of a model calls, with what sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops.gated_delta import CHANNELS
from hetero_megatron.ops.gemm_fp8 import HYBRID
from hetero_megatron.ops.kernel_plan import KernelPlan, resolve
from hetero_megatron.ops.registry import torch_registry
from hetero_megatron.ops.spec import Signature
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.spec import Dropout, ModelSpec, Share, tensor_box, trained_tensors
from hetero_megatron.spec.dropout import NO_DROPOUT

Dims = dict[str, tuple[int, ...]]


def stage_operators(spec: ModelSpec, share: Share, head: bool, tp: int) -> Iterator[tuple[str, Dims]]:
    """(operator, sizes) of everything that forward, backward and the update of one rank may call."""
    h, d = spec.hidden_size, spec.head_dim
    heads, kv_heads = (b - a for a, b in (share.q_heads, share.kv_heads))
    ffn, vocabulary = share.ffn[1] - share.ffn[0], share.vocab[1] - share.vocab[0]
    yield "gemm", {"inputs": (h, heads * d, ffn), "outputs": (heads * d, kv_heads * d, h, ffn)}
    if spec.in_nf4:
        yield "nf4_dequantize", {"inputs": (h, heads * d, ffn)}
    rms_widths = ((h,) if spec.norm == "rms" else ()) + ((d,) if spec.qk_norm == "head" else ())
    rms_widths += (spec.delta.value_dim,) if spec.delta is not None and spec.delta.mixer == "gated_delta" else ()
    if rms_widths:
        yield "rms_norm", {"width": rms_widths}
    if spec.norm == "rms" and spec.norm_placement != "post":
        yield "add_rms_norm", {"width": (h,)}
    of_heads = (d,) if spec.qk_norm in ("head_layer", "each_head") else ()
    if spec.norm == "layer" or of_heads:
        yield "layer_norm", {"width": ((h,) if spec.norm == "layer" else ()) + of_heads}
    if spec.ropes:
        turned = tuple(dict.fromkeys(rope.width(d) for rope in spec.ropes))
        yield "rope", {"head_dim": turned, "heads": (heads, kv_heads)}
    activation = spec.activation if spec.activation in ("swiglu", "clamped_swiglu", "squared_relu") else "gelu"
    yield activation, {"width": (ffn,)}
    if spec.moe is not None:
        columns = share.expert_ffn[1] - share.expert_ffn[0]
        yield "grouped_gemm", {"inputs": (h, columns), "outputs": (columns, h)}
        yield "moe_permute", {"width": (h,)}
        yield "moe_unpermute", {"width": (h,)}
        yield "router_topk", {"experts": (spec.moe.num_experts,)}
    yield "attention", {"head_dim": (d,), "heads": (heads,), "kv_heads": (kv_heads,)}
    if spec.delta is not None:
        key_heads, value_heads = (b - a for a, b in (share.key_heads, share.value_heads))
        widths = key_heads * spec.delta.key_dim, value_heads * spec.delta.value_dim
        yield "causal_conv", {"width": widths, "taps": (spec.delta.kernel,)}
        heads_of = {"key_heads": (key_heads,), "value_heads": (value_heads,)}
        yield spec.delta.rule, {"key_dim": (spec.delta.key_dim,), "value_dim": (spec.delta.value_dim,), **heads_of}
    if head:
        yield ("vocab_cross_entropy" if tp > 1 else "cross_entropy"), {"vocabulary": (vocabulary,)}
    yield "adamw", {}
    yield "l2norm", {}


def adapted_widths(spec: ModelSpec, share: Share) -> set[int]:
    """Features of this share that adapters drop some of."""
    if spec.lora is None or not spec.lora.dropout:
        return set()
    widths = {tensor_box(t, share).shape[-1] for t in trained_tensors(spec) if t.name.endswith("lora_A.weight")}
    return widths - {0}


def default_kernels(
    spec: ModelSpec,
    share: Share,
    head: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tp: int = 1,
    requests: Mapping[str, str] | None = None,
    field: str = "kernels",
    compiled: bool = False,
    chunked: bool = False,
    tiled: bool = False,
    fp8: Fp8 | None = None,
    dropout: Dropout = NO_DROPOUT,
) -> KernelPlan:
    """The kernel plan of a stage from torch's own providers, without plugins; see :func:`stage_signatures`."""
    base = Signature("", torch.device(device).type, dtype, compiled=compiled)
    signatures = stage_signatures(base, spec, share, head, tp, requests or (), chunked, tiled, fp8, dropout)
    return resolve(torch_registry(), signatures, requests, field)


# What a compiled layer calls; loss and update are called outside.
_IN_LAYERS = (
    "gemm", "rms_norm", "add_rms_norm", "layer_norm", "rope", "swiglu", "clamped_swiglu", "gelu", "squared_relu",
    "attention",
)


def stage_signatures(
    base: Signature, spec: ModelSpec, share: Share, head: bool, tp: int, wanted: Iterable[str] = (),
    chunked: bool = False, tiled: bool = False, fp8: Fp8 | None = None, dropout: Dropout = NO_DROPOUT,
) -> list[Signature]:  # fmt: skip
    """A signature per operator of a stage; device, dtype and the like are those of ``base``.

    Args:
        wanted: operators that somebody asks for: further ones only run then (``linear_cross_entropy``).
        chunked: head and loss go through the tokens in chunks (``parallel/vocab.py``), whose operator is
            ``linear_cross_entropy`` for a whole vocabulary, else ``vocab_cross_entropy``.
        tiled: the stage has context groups, which merge partial results of attention and carry states.
        fp8: what the linear modules of the stage's layers compute in; None: as head and router do.
        dropout: of training.

    Raises:
        UserError: an operator is asked for that this stage cannot call.
    """
    operators = dict(stage_operators(spec, share, head, tp))
    widths = ({spec.hidden_size} if dropout.hidden else set()) | adapted_widths(spec, share)
    if widths:
        operators["dropout"] = {"width": tuple(sorted(widths))}
    if tiled:
        operators["attn_merge"] = {key: operators["attention"][key] for key in ("head_dim", "heads")}
        # Values with further features, which carry the state of other ranks.
        if "gated_delta_rule" in operators and spec.delta is not None:
            widths_of_values = (spec.delta.value_dim, spec.delta.value_dim + spec.delta.key_dim)
            operators["gated_delta_rule"] = operators["gated_delta_rule"] | {"value_dim": widths_of_values}
    if "linear_cross_entropy" in wanted and head:
        if tp > 1:
            raise UserError(
                "head and loss in one are for whole vocabularies; this stage cuts its own", field="tp", value=tp,
                accepted="tp: 1 on the last stage, or no linear_cross_entropy in kernels",
            )  # fmt: skip
        if not spec.plain_head:
            lacks = "bias of the head" if spec.head_bias else "soft-capped logits"
            raise UserError(
                f"head and loss in one know no {lacks}", field="kernels.linear_cross_entropy",
                accepted="cross_entropy or vocab_cross_entropy for this model",
            )  # fmt: skip
        operators["linear_cross_entropy"] = operators.pop("cross_entropy")
    elif chunked and "cross_entropy" in operators:
        if "cross_entropy" in wanted:
            raise UserError(
                "the logits of a micro-batch are over --max-logits-mib, so that the loss goes through them in chunks",
                field="kernels.cross_entropy",
                accepted="vocab_cross_entropy or linear_cross_entropy instead, a smaller micro-batch, or more MiB",
            )
        # What knows no soft-capped logits and no bias, and would make the gradient of a frozen head.
        separate_loss = not spec.plain_head or spec.lora is not None or "vocab_cross_entropy" in wanted
        operators["vocab_cross_entropy" if separate_loss else "linear_cross_entropy"] = operators.pop("cross_entropy")
    if fp8 is not None:
        operators[fp8.operator] = operators["gemm"]
    of_attention = {"softcap": spec.attn_softcap is not None, "sinks": spec.sinks, "dropout": dropout.attention > 0}
    features: dict[str, tuple[str, ...]] = {
        "attention": tuple(name for name, is_used in of_attention.items() if is_used),
        "gated_delta_rule": (CHANNELS,) if spec.delta is not None and spec.delta.by_feature else (),
        **({fp8.operator: (HYBRID,)} if fp8 is not None and fp8.hybrid else {}),
    }
    return [
        replace(base, op=op, dims=dims, compiled=base.compiled and op in _IN_LAYERS, features=features.get(op, ()))
        for op, dims in operators.items()
    ]
