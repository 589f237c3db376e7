"""What all ranks of a run must have alike, by the names that a refusal uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import RunConfig

ALIKE = (
    "spec", "schedule", "seed", "dtype", "loss_scale", "optimizer", "evaluation", "check_nan", "skip_train",
    "logits_bytes", "save_hf_dtype", "balancing", "dropout", "fp8",
)  # fmt: skip
WATCHED = ("check_spikes", "rerun", "check_kernels", "replica_interval")  # of ``failure``: all ranks take part
READ = (
    "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "dataloader_type", "sft", "sft_loss",
    "overlong_samples", "no_packing", "shuffle_buffer",
)  # of ``data``
NAMES = ("spec.name", "spec.notices")  # of a directory, perhaps
PLACES = ("save", "load", "pretrained")  # of ``checkpoint``: directories, which nodes may call otherwise


def run_facts(config: RunConfig) -> Mapping[str, object]:
    """Everything that changes a number, or what ranks do together; not where a node keeps its files, what it logs, or
    with which kernels it computes."""
    # Islands are no part of the fingerprint, and in others than its peers' a rank would wait for messages for ever.
    facts: dict[str, object] = {"plan fingerprint": config.plan.fingerprint(), "plan islands": config.plan.islands}
    for name in ALIKE:
        facts.update(_walk(name, getattr(config, name)))
    for name in NAMES:
        del facts[name]
    facts |= {f"failure.{name}": getattr(config.failure, name) for name in WATCHED}
    facts |= {f"data.{name}": getattr(config.data, name, None) for name in READ}
    for name, value in _walk("checkpoint", config.checkpoint):
        facts[name] = value is not None if name.split(".")[-1] in PLACES else value
    for name in ("load_hf", "save_hf"):
        facts[name] = getattr(config, name) is not None
    adapter = config.adapter
    facts["adapter"] = [adapter.load is not None, adapter.save is not None, adapter.merge]
    return facts


def check_agreement(group: Group, facts: Mapping[str, object]) -> None:
    """All ranks of the group have the same facts; otherwise all of them refuse, and name one that differs."""
    everyone = group.gather_objects({name: repr(fact) for name, fact in facts.items()}, dict[str, str])
    first, *others = zip(group.ranks, everyone, strict=True)
    for rank, theirs in others:
        for name in dict.fromkeys((*first[1], *theirs)):
            if theirs.get(name) != first[1].get(name):
                raise UserError(
                    f"rank {rank} has {theirs.get(name)}, rank {first[0]} has {first[1].get(name)}", field=name,
                    accepted="the same plan, model, options and data on every rank",
                )  # fmt: skip


def _walk(name: str, value: object) -> Iterator[tuple[str, object]]:
    """A dataclass's fields as ``name.field``; anything else as it is."""
    if not is_dataclass(value):
        yield name, value
        return
    for field in fields(value):
        yield from _walk(f"{name}.{field.name}", getattr(value, field.name))
