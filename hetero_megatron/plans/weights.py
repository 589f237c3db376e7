"""Weights that the replicas of a stage divide among themselves: how a plan spells it, what it cannot be combined with.
No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_megatron.plans.canonical import GATHERS, Plan, Stage, WeightSharding
from hetero_megatron.plans.fields import Source, reduced
from hetero_megatron.utils.text import plural
from hetero_megatron.utils.yaml_document import Entry

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec

KEYS = ("shard", "gather", "reshard_after_forward")


def read_weights(entry: Entry, ranks: int) -> WeightSharding:
    """The key ``weights`` of a stage with so many ranks; shares without a common divisor, so that equal ones are
    spelled alike."""
    keys = entry.mapping(KEYS)
    shard = tuple(keys["shard"].integers(0)) if "shard" in keys else (1,) * ranks
    if len(shard) != ranks:
        keys["shard"].fail(
            f"{plural(len(shard), 'share')} for {plural(ranks, 'rank')}", accepted="one share per rank of the stage"
        )
    if not any(shard):
        keys["shard"].fail("nobody keeps anything", accepted="shares of which at least one is above 0")
    gather = keys["gather"].choice(GATHERS) if "gather" in keys else "layer"
    reshard = keys["reshard_after_forward"].flag() if "reshard_after_forward" in keys else gather != "step"
    if reshard and gather == "step":
        keys["reshard_after_forward"].fail(
            "weights that are gathered once a step stay whole until its end", accepted="false, or gather: layer"
        )
    return WeightSharding(reduced(shard), gather, reshard)


def spelled_weights(weights: WeightSharding) -> dict[str, Any]:
    """As a plan file has it."""
    entry: dict[str, Any] = {"shard": list(weights.shard), "gather": weights.gather}
    if weights.gather != "step" and not weights.reshard_after_forward:
        entry["reshard_after_forward"] = False
    return entry


def weights_can_be_sharded(plan: Plan, stage: Stage, path: str, spec: ModelSpec, source: Source) -> None:
    """Refuse what weights of a stage cannot be divided beside."""
    assert stage.weights is not None
    field = f"{path}.weights"
    if len(stage.units) < 2 and not stage.optimizer.offload:
        accepted = "inner replicas or context groups (dp_split, or more ranks than tp), or optimizer: {offload: true}"
        raise source.error("nobody else in the stage holds the same weights", field, len(stage.units), accepted)
    refused = (
        (spec.lora is not None and spec.lora.dora, "DoRA, which measures whole rows in every step", "--use-dora"),
        (stage.dtype == "fp8", "products in fp8", "dtype"),
    )
    for present, feature, value in refused:
        if present:
            accepted = "no weights key for this stage"
            raise source.error(f"weights cannot be divided beside {feature}", field, value, accepted)
    if len({unit.tp_split for unit in stage.units}) == 1:
        columns = [sum(stage.weights.shard[t :: stage.units[0].tp]) for t in range(stage.units[0].tp)]
        if 0 in columns:
            raise source.error(
                f"no replica keeps what TP rank {columns.index(0)} of each computes with", f"{field}.shard",
                list(stage.weights.shard), "for every TP rank a share above 0 in some replica",
            )  # fmt: skip
    elif 0 in stage.weights.shard:
        raise source.error(
            "replicas of unlike TP all keep something", f"{field}.shard", list(stage.weights.shard), "shares above 0"
        )
