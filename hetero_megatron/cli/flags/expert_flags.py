"""Megatron's flags about mixtures of experts -> the experts of a ModelSpec."""

from __future__ import annotations

import ast

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.spec import ModelSpec, MoE
from hetero_megatron.spec.moe import Balancing

_FLAG_OF = {
    "num_experts": "num_experts", "top_k": "moe_router_topk", "ffn_hidden_size": "moe_ffn_hidden_size",
    "groups": "moe_router_num_groups", "top_groups": "moe_router_group_topk", "group_size": "moe_router_group_topk",
    "shared_gate": "moe_shared_expert_gate",
}  # fmt: skip
MAX_LAYERS = 100_000


def build_moe(args: Arguments, ffn_hidden_size: int) -> MoE | None:
    """What the MLP of a layer with experts is; None: a dense model.

    Raises:
        UserError: names the flag.
    """
    if args["num_experts"] is None:
        return None
    for key, required in (("swiglu", True), ("disable_bias_linear", True)):
        if args[key] is not required:
            problem = "--num-experts needs it: experts are gated by SiLU and have no biases"
            raise flag_error(key, "not given", problem, "the flag beside --num-experts")
    top_k, score = args["moe_router_topk"], args["moe_router_score_function"]
    sigmoid, softmax_first = score == "sigmoid", args["moe_router_pre_softmax"]
    if softmax_first and sigmoid:
        raise flag_error("moe_router_pre_softmax", True, "has no effect on scores by sigmoid")
    if top_k == 1 and not sigmoid and not softmax_first:  # as Megatron
        raise flag_error("moe_router_topk", 1, "a softmax over one expert is 1", "--moe-router-pre-softmax beside it")
    moves = args["moe_router_enable_expert_bias"]
    if moves and not sigmoid:
        raise flag_error("moe_router_enable_expert_bias", True, "is for --moe-router-score-function sigmoid")
    groups, top_groups = args["moe_router_num_groups"] or 1, args["moe_router_group_topk"] or 1
    if groups > 1 and top_k < top_groups:
        raise flag_error("moe_router_group_topk", top_groups, f"a token uses {top_k} experts", f"1 to {top_k}")
    scale = args["moe_router_topk_scaling_factor"]
    try:
        return MoE(
            num_experts=args["num_experts"],
            top_k=top_k,
            ffn_hidden_size=args["moe_ffn_hidden_size"] or ffn_hidden_size,
            score=score,
            # The softmax over the best of the logits is that over all, normalised over the best.
            normalize=top_k > 1 and (sigmoid or not softmax_first),
            scale=1.0 if scale is None else scale,
            groups=groups,
            top_groups=top_groups,
            group_size=top_k // top_groups if groups > 1 else 1,
            score_bias=moves,
            shared_ffn=args["moe_shared_expert_intermediate_size"] or 0,
            shared_gate=args["moe_shared_expert_gate"],
        )
    except UserError as error:
        raise flag_error(_FLAG_OF[error.field], error.value, error.problem, error.accepted) from None


def mlp_kinds(text: str, layers: int) -> list[str]:
    """``moe`` or ``dense`` for every layer, by --moe-layer-freq."""
    pattern = _pattern(text)
    if isinstance(pattern, int) and pattern >= 1:
        return ["moe" if i % pattern == 0 else "dense" for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers or set(pattern) - {0, 1}:
        accepted = f"N for every N-th layer, or a list of 0 and 1 for each of {layers} layers"
        raise flag_error("moe_layer_freq", text, "does not say which layers have experts", accepted)
    return ["moe" if is_moe else "dense" for is_moe in pattern]


def _pattern(text: str) -> int | list[int] | None:
    """The value of an expression of whole numbers, lists of them, + and *, as Megatron evaluates it; None: another."""
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        items = [_value(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        return _combined(node.op, _value(node.left), _value(node.right))
    raise ValueError


def _combined(operator: ast.operator, left: int | list[int], right: int | list[int]) -> list[int]:
    """Two lists one after the other, or a list several times."""
    if isinstance(operator, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(operator, ast.Mult) and isinstance(left, int) and isinstance(right, list):
        left, right = right, left
    times = isinstance(operator, ast.Mult) and isinstance(left, list) and isinstance(right, int)
    if times and right * len(left) <= MAX_LAYERS:  # type: ignore[operator, arg-type]
        return left * right  # type: ignore[operator, return-value]
    raise ValueError


def moe_family(args: Arguments, moe: MoE) -> str:
    """The Hugging Face family by whose names the tensors go; whether its config can say the model is another matter."""
    if moe.score == "sigmoid":
        return "glm4_moe"
    if args["qk_layernorm"]:
        return "qwen3_moe"
    return "qwen2_moe" if moe.shared_ffn or args["add_qkv_bias"] else "mixtral"


def said_of_experts(moe: MoE) -> dict[str, object]:
    """What flags about experts beside --model must say, by key."""
    return {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_score_function": "sigmoid" if moe.score == "sigmoid" else "softmax",
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalize,
        "moe_router_num_groups": moe.groups if moe.groups > 1 else None,
        "moe_router_group_topk": moe.top_groups if moe.groups > 1 else None,
        "moe_router_topk_scaling_factor": moe.scale,
    }


BALANCING_FLAGS = (
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "routing_stats",
)  # fmt: skip


def build_balancing(args: Arguments, spec: ModelSpec, plan: Plan) -> Balancing:
    """What the flags ask for; says what the loss that is printed includes.

    Raises:
        UserError: a coefficient is missing or negative, or the model cannot be balanced so.
    """
    if spec.moe is None:
        for key in BALANCING_FLAGS:
            if key in args.given and args[key] not in (False, "none"):
                raise flag_error(key, args[key], "the model has no mixture of experts")
        return Balancing()
    kind, coefficient = args["moe_router_load_balancing_type"], args["moe_aux_loss_coeff"]
    if kind == "aux_loss" and coefficient:
        _check_aux_loss(plan)
    if kind == "seq_aux_loss" and coefficient is None:
        problem = f"missing: --moe-router-load-balancing-type {kind} needs it"
        raise flag_error("moe_aux_loss_coeff", None, problem, "a number, e.g. 1e-4")
    moves = args["moe_router_enable_expert_bias"]
    if moves and not spec.moe.score_bias:
        problem, accepted = "the router of this model has no bias", "--moe-router-load-balancing-type seq_aux_loss"
        raise flag_error("moe_router_enable_expert_bias", True, problem, accepted)
    if moves and spec.lora is not None:
        problem = "the router's bias belongs to the base model, which adapters leave as it is"
        raise flag_error("moe_router_enable_expert_bias", True, problem)
    balancing = Balancing(
        coefficient or 0.0, args["moe_z_loss_coeff"] or 0.0, args["moe_router_bias_update_rate"] if moves else 0.0
    )
    args.notices.append(balancing.describe(spec.moe))
    return balancing


def _check_aux_loss(plan: Plan) -> None:
    """Megatron's aux_loss is of a rank's tokens of a micro-batch: the sequence loss, where those are a sequence."""
    key = "moe_router_load_balancing_type"
    loss = "aux_loss is of each micro-batch, so another plan would train otherwise"
    remedy = "seq_aux_loss; or --micro-batch-size 1 without tensor and context parallelism, where the two are the same"
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for unit in stage.units:
                rows = unit.sequences[1] - unit.sequences[0]
                reason = f"a rank has {rows} sequences of a micro-batch" if rows > 1 else (
                    f"tensor parallelism {unit.tp} divides a sequence" if unit.tp > 1 else
                    "context parallelism divides a sequence" if unit.num_tokens < plan.seq_length else ""
                )  # fmt: skip
                if reason:
                    raise flag_error(key, "aux_loss", f"{loss}: here {reason}", remedy)
