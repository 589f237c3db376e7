"""Which stages compute in fp8, and which may: their chips have to have it, and their cuts leave the loss as it is."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.plans.canonical import Plan, Stage, Unit
from hetero_megatron.plans.fields import Source
from hetero_megatron.plans.fp8 import BLOCK, Fp8
from hetero_megatron.plans.shares import rank_shares

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec


def stage_fp8(stage: Stage, fp8: Fp8) -> Fp8 | None:
    """In what the linear modules of a stage's layers compute in a run in fp8; None: in the dtype of the weights."""
    return fp8 if stage.dtype in (None, "fp8") else None


def fp8_fits(
    plan: Plan, spec: ModelSpec, fp8: Fp8 | None, dtype: str, cluster: Cluster | None, source: Source | None = None
) -> None:
    """Refuse stages that compute in what the run, their chips or their cuts do not allow.

    Values that are rounded together have to be on one rank, or the loss would depend on the plan.

    Args:
        dtype: of the weights.
    """
    source = source or Source()
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            path = f"pipelines[{p}].stages[{s}]"
            _asked_for(stage, path, fp8, dtype, source)
            if fp8 is None or stage_fp8(stage, fp8) is None or not stage.num_layers:
                continue
            if cluster is not None:
                _chips_have_it(stage, path, dtype, cluster, source)
            _cut_is_allowed(stage, plan.seq_length, path, spec, fp8, dtype, source)


def stage_fits(stage: Stage, seq_length: int, spec: ModelSpec, fp8: Fp8) -> bool:
    """Whether the stage's cuts allow its linear modules to be in fp8, whatever its chips."""
    try:
        _cut_is_allowed(stage, seq_length, "", spec, fp8, "", Source())
    except UserError:
        return False
    return True


@lru_cache(maxsize=256)
def cut_fits(spec: ModelSpec, tp: int, fp8: Fp8) -> bool:
    """The same of layers that are cut evenly over ``tp`` ranks."""
    unit = Unit(tuple(range(tp)), (1,) * tp, (0, 1), ((0, BLOCK),), (0, spec.num_heads))
    return stage_fits(Stage(((0, 1),), (unit,), False, False), BLOCK, spec, fp8)


def _cut_is_allowed(
    stage: Stage, seq_length: int, path: str, spec: ModelSpec, fp8: Fp8, dtype: str, source: Source
) -> None:
    _mixers_are_known(path, spec, dtype, source)
    _latents_are_whole(stage, path, spec, dtype, source)
    _key_heads_are_whole(stage, path, spec, dtype, source)
    _tokens_are_whole(stage, seq_length, path, fp8, dtype, source)
    if fp8.recipe == "blockwise":
        _cuts_are_at_blocks(stage, path, spec, dtype, source)


def _asked_for(stage: Stage, path: str, fp8: Fp8 | None, dtype: str, source: Source) -> None:
    if stage.dtype == "fp8" and fp8 is None:
        raise source.error(
            "the run computes nothing in fp8", f"{path}.dtype", "fp8", f"{dtype}, or --fp8-format e4m3 or hybrid"
        )
    if stage.dtype not in (None, "fp8", dtype):
        accepted = f"{dtype} or fp8" if fp8 is not None else f"{dtype}, or the flag of this dtype"
        raise source.error(f"the weights of the run are {dtype}", f"{path}.dtype", stage.dtype, accepted)


def _chips_have_it(stage: Stage, path: str, dtype: str, cluster: Cluster, source: Source) -> None:
    for rank in stage.ranks:
        chip = cluster.chip_of(rank)
        if "fp8" not in chip.dtypes:
            raise source.error(
                f"rank {rank} is a {chip.name}, which does not compute in fp8", f"{path}.dtype", stage.dtype or "fp8",
                f"{dtype}, or chips that have fp8",
            )  # fmt: skip


def _mixers_are_known(path: str, spec: ModelSpec, dtype: str, source: Source) -> None:
    if spec.delta is not None or spec.single_blocks:
        raise source.error(
            "models with linear attention, or with layers of one block, compute nothing in fp8", f"{path}.dtype", "fp8",
            f"{dtype}, no --fp8-format",
        )  # fmt: skip


def _latents_are_whole(stage: Stage, path: str, spec: ModelSpec, dtype: str, source: Source) -> None:
    largest = max(unit.tp for unit in stage.units)
    if spec.mla is not None and largest > 1:
        raise source.error(
            "latents are whole on every rank, which would round its part of their gradient in fp8, and the sum depends "
            "on the cut", f"{path}.tp", largest, f"1, or dtype: {dtype}",
        )  # fmt: skip


def _key_heads_are_whole(stage: Stage, path: str, spec: ModelSpec, dtype: str, source: Source) -> None:
    for unit in stage.units:
        if unit.tp > spec.num_kv_heads:
            raise source.error(
                "copies of a key-value head would round parts of its gradient in fp8, and the sum depends on the cut",
                f"{path}.tp", unit.tp, f"at most {spec.num_kv_heads} (key-value heads), or dtype: {dtype}",
            )  # fmt: skip


def _tokens_are_whole(stage: Stage, seq_length: int, path: str, fp8: Fp8, dtype: str, source: Source) -> None:
    for unit in stage.units:
        cuts = [t for interval in unit.tokens for t in interval if 0 < t < seq_length]
        if cuts and fp8.recipe == "tensorwise":
            raise source.error(
                "a sequence has one scale, and here it is divided over several ranks", f"{path}.context",
                f"{len(stage.units)} members", f"--fp8-recipe blockwise, or dtype: {dtype}",
            )  # fmt: skip
        odd = next((t for t in cuts if t % BLOCK), None)
        if odd is not None:
            raise source.error(
                f"blocks of {BLOCK} tokens share a scale, and token {odd} begins a part", f"{path}.context", odd,
                f"intervals that begin and end at multiples of {BLOCK}, or dtype: {dtype}",
            )  # fmt: skip


def _cuts_are_at_blocks(stage: Stage, path: str, spec: ModelSpec, dtype: str, source: Source) -> None:
    for rank, share in rank_shares(spec, stage).items():
        unit = next(unit for unit in stage.units if rank in unit.ranks)
        if unit.tp == 1:
            continue
        d = spec.head_dim
        cuts = {
            "columns of queries": [d * i for i in share.q_heads], "columns of keys": [d * i for i in share.kv_heads],
            "feed-forward columns": share.ffn, "columns of shared experts": share.shared_ffn,
        }  # fmt: skip
        ends = {
            "columns of queries": d * spec.num_heads, "columns of keys": d * spec.num_kv_heads,
            "feed-forward columns": spec.ffn_hidden_size,
            "columns of shared experts": spec.moe.shared_ffn if spec.moe is not None else 0,
        }  # fmt: skip
        for columns, cut_points in cuts.items():
            odd = next((i for i in cut_points if i % BLOCK and i != ends[columns]), None)
            if odd is not None:
                raise source.error(
                    f"blocks of {BLOCK} {columns} share a scale, and rank {rank} is cut at {odd}", f"{path}.tp",
                    unit.tp,
                    f"a tp_split that cuts at multiples of {BLOCK}, --fp8-recipe tensorwise, or dtype: {dtype}",
                )  # fmt: skip
