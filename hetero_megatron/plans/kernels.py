"""Names of operators, and the ``--kernels`` flag: which provider a user wants for which operator on which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetero_megatron.errors import UserError
from hetero_megatron.plans.canonical import Plan, Stage
from hetero_megatron.utils.text import did_you_mean

EVERY = "all"  # one provider for every operator that it has

OPERATORS = (
    "adamw", "add_rms_norm", "attention", "attn_delta", "attn_merge", "causal_conv", "clamped_swiglu", "cross_entropy",
    "dropout", "gated_delta_rule", "gelu", "gemm", "gemm_fp8_blockwise", "gemm_fp8_tensorwise", "grouped_gemm",
    "l2norm", "layer_norm", "linear_cross_entropy", "moe_permute", "moe_unpermute", "nf4_dequantize", "rms_norm",
    "rope", "router_topk", "softmax", "squared_relu", "state_space_rule", "swiglu", "vocab_cross_entropy",
)  # fmt: skip


def operator_problem(name: str) -> str | None:
    """Why ``name`` is no key of ``kernels``; None if it is one."""
    if name == EVERY or name in OPERATORS:
        return None
    return f"no such operator{did_you_mean(name, OPERATORS)}"


def with_kernels(plan: Plan, words: Sequence[str]) -> Plan:
    """``plan`` with the wishes of ``--kernels`` in its stages; what a stage's own ``kernels`` says stays.

    Args:
        words: ``PROVIDER`` (every operator that it has), ``OPERATOR=PROVIDER``, or either behind ``PIPELINE.STAGE:``.

    Raises:
        UserError: a word that is none of these, an unknown operator or stage, or two wishes for one thing.
    """
    wishes: dict[tuple[tuple[int, int] | None, str], str] = {}
    for word in words:
        place, op, provider = _parse(word, plan)
        if wishes.setdefault((place, op), provider) != provider:
            raise _error(word, f"{op} is wanted from {wishes[place, op]} too", "one provider")
    pipelines = []
    for p, pipeline in enumerate(plan.pipelines):
        stages = tuple(_stage(stage, (p, s), wishes) for s, stage in enumerate(pipeline.stages))
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


def _parse(word: str, plan: Plan) -> tuple[tuple[int, int] | None, str, str]:
    scope, _, request = word.rpartition(":")
    op, equals, provider = request.partition("=")
    if not equals:
        op, provider = EVERY, op
    if not provider or not op:
        raise _error(word, "not understood", "PROVIDER, OPERATOR=PROVIDER or PIPELINE.STAGE:OPERATOR=PROVIDER")
    problem = operator_problem(op)
    if problem is not None:
        raise _error(word, problem, ", ".join(OPERATORS))
    if not scope:
        return None, op, provider
    p, _, s = scope.partition(".")
    if not (p.isdecimal() and s.isdecimal() and int(p) < len(plan.pipelines)) or int(s) >= len(
        plan.pipelines[int(p)].stages
    ):
        raise _error(word, f"the plan has no stage {scope}", "PIPELINE.STAGE, counted from 0")
    return (int(p), int(s)), op, provider


def _stage(stage: Stage, place: tuple[int, int], wishes: dict[tuple[tuple[int, int] | None, str], str]) -> Stage:
    kernels = {op: provider for (scope, op), provider in wishes.items() if scope is None} | dict(stage.kernels)
    for (scope, op), provider in wishes.items():
        if scope == place:
            if dict(stage.kernels).get(op, provider) != provider:
                problem = f"the plan says {dict(stage.kernels)[op]}"
                raise _error(f"{place[0]}.{place[1]}:{op}={provider}", problem, "one of the two")
            kernels[op] = provider
    return replace(stage, kernels=tuple(sorted(kernels.items())))


def _error(word: str, problem: str, accepted: str) -> UserError:
    return UserError(problem, field="--kernels", value=word, accepted=accepted, where="command line")
