"""What one rank does for routed experts, and the bytes that it takes: formulas of a mixture-of-experts layer.

How many tokens an expert gets is known only when it runs; these are expectations.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_megatron.spec.lora import MLP_TARGETS
from hetero_megatron.spec.model_spec import ModelSpec

INDEX = 8  # bytes of an expert's or a row's number


@dataclass(frozen=True)
class ExpertLoad:
    """Of one rank, for one micro-batch in a mixture-of-experts layer.

    Attributes:
        layers: share of the layers in question that are mixtures of experts, 0 to 1.
        tokens: that the rank routes: its own.
        sent: copies of them that it sends, one to each rank that has some of a token's experts, its own included.
        arriving: tokens that come to the experts here, from all ranks.
        rows: pairs of a token and an expert here.
        experts: here; columns: of each of them, here.
        members: ranks that exchange tokens, over both hops where there are two.
        passed_on, taken_on: tokens that it sends in the first of two hops, and those that come there, its own included.
    """

    layers: float
    tokens: float
    sent: float
    arriving: float
    rows: float
    experts: int
    columns: float
    members: int
    passed_on: float = 0.0
    taken_on: float = 0.0

    @property
    def hops(self) -> int:
        """Exchanges on the way to the experts."""
        return 2 if self.passed_on or self.taken_on else 1

    @property
    def exchanged(self) -> float:
        """Tokens packed or unpacked, in all hops."""
        return self.sent + self.arriving + self.passed_on + self.taken_on


def expert_elements(spec: ModelSpec) -> int:
    """Of the matrices of one expert of one layer."""
    assert spec.moe is not None
    return len(spec.mlp_projections) * spec.hidden_size * spec.moe.ffn_hidden_size


def expert_adapter_ranks(spec: ModelSpec) -> int:
    """What the adapters of a layer's experts keep between A and B, per row: their ranks."""
    if spec.moe is None or spec.lora is None:
        return 0
    return spec.lora.rank * sum(name in MLP_TARGETS for name in spec.lora.targets)


def scaled_expert_bytes(spec: ModelSpec, columns: float, item: int) -> float:
    """What DoRA keeps per row of a layer's experts, of which a rank has ``columns`` columns: outputs of adapted
    matrices before they are scaled, and the number of the row's expert, each."""
    if spec.moe is None or spec.lora is None or not spec.lora.dora:
        return 0.0
    outputs = {"gate_proj": columns, "up_proj": columns, "down_proj": spec.hidden_size}
    return sum(item * outputs[name] + INDEX for name in spec.lora.targets if name in MLP_TARGETS)


def plain_load(spec: ModelSpec, tokens: float, share: float = 1.0, members: int = 1) -> ExpertLoad | None:
    """Of a rank in a TP group where no plan divides the experts: all of them, and a share of the columns of each, in an
    average layer. None for a dense model.

    Args:
        tokens: of the group; members: its ranks, each with an equal part of the tokens.
    """
    moe = spec.moe
    if moe is None:
        return None
    return ExpertLoad(
        spec.moe_share, tokens / members, tokens, tokens, tokens * moe.top_k, moe.num_experts,
        moe.ffn_hidden_size * share, members,
    )  # fmt: skip


def expert_activation_bytes(spec: ModelSpec, load: ExpertLoad, item: int, elementwise: bool = False) -> float:
    """Bytes that router and experts keep from forward to backward:

    - of each own token the router's input, its logits, and the numbers of its experts; of a token sent, where it went;
    - of each arriving token where its rows are, and its weights;
    - of each row its token's number, input and output of the expert, gate, up and their product (without a gate, up
      and its activation), and what is between A and B of its adapters; where weights multiply inputs, these before it,
      too; with DoRA :func:`scaled_expert_bytes`.

    ``elementwise``: neither the product of gate and up (or activation) nor the router's input where a norm puts it out,
    which are made again.
    """
    moe, h, wide = spec.moe, spec.hidden_size, max(item, 4)
    assert moe is not None
    gated = (h + 1) * moe.shared_gate  # what all tokens use, before the gate, and the gate
    router_input = 0 if elementwise and spec.norm_placement != "post" else h
    own_tokens = load.tokens * (item * (router_input + moe.num_experts + gated) + INDEX * moe.top_k)
    sent = (load.sent + load.passed_on) * (INDEX + moe.top_k) if load.members > 1 else 0.0
    arriving = load.arriving * moe.top_k * (INDEX + wide)
    widths = len(spec.mlp_projections) - elementwise
    row = (2 + moe.weigh_inputs) * h + widths * load.columns + expert_adapter_ranks(spec)
    scaled = scaled_expert_bytes(spec, load.columns, item)
    return own_tokens + sent + arriving + load.rows * (item * row + scaled + INDEX)


def expert_backward_bytes(spec: ModelSpec, load: ExpertLoad, item: int) -> tuple[float, float]:
    """Bytes that backward through the experts needs beside what they keep: (while the gradients of the rows are made,
    with their products with the rows, of 16-bit ones all in fp32; in the experts, whose output is gone, at the worst
    moment). That is in ``down_proj``; in the activation, where what it put out is gone, with that one's gradient, those
    of its inputs and a helper; or in what is before it. Beside products is what is made of frozen weights in 8 bits."""
    h, wide, columns = spec.hidden_size, max(item, 4), load.columns
    returned = load.arriving * item * h if load.members > 1 else 0.0  # gradients of what was sent back
    outputs = load.rows * h * (3 * wide if item < wide else 2 * item)
    reading = len(spec.mlp_projections) - 1  # matrices that read the experts' input
    in_activation, in_products = (2 * reading - 1) * columns - h, max(columns, (reading - 1) * (h + columns))
    decoded = load.experts * columns * h * item * spec.in_few_bits
    in_experts = max(load.rows * item * in_activation, load.rows * item * in_products + decoded)
    return returned + outputs, returned + in_experts


def expert_operand_bytes(spec: ModelSpec, load: ExpertLoad, item: int) -> float:
    """Bytes of the operands of the experts' weight gradients, which wait from B_INPUT to W: inputs, and gradients of
    outputs, of all matrices, and those of the router."""
    moe, h = spec.moe, spec.hidden_size
    assert moe is not None
    rows = load.rows * (2 * h + len(spec.mlp_projections) * load.columns + 2 * expert_adapter_ranks(spec))
    return item * (rows + load.tokens * (h + moe.num_experts))


def expert_flops(spec: ModelSpec, load: ExpertLoad) -> float:
    """Forward FLOPs of the experts and the router."""
    assert spec.moe is not None
    h, columns = spec.hidden_size, len(spec.mlp_projections) * load.columns
    adapters = 2.0 * load.rows * expert_adapter_ranks(spec) * (h + load.columns)
    return adapters + 2.0 * h * (load.rows * columns + load.tokens * spec.moe.num_experts)
