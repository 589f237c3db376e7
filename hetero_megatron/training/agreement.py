"""What all ranks must have alike before they start: the program and its versions, the plan, the configuration and the
data."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch

from hetero_megatron import __version__
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.platform import Platform
from hetero_megatron.platform.plugins import Plugins, source_file
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.text import notice_line

ALIKE = (
    "spec", "schedule", "seed", "dtype", "loss_scale", "optimizer", "evaluation", "check_nan", "skip_train",
    "logits_bytes", "save_hf_dtype", "balancing", "dropout", "fp8", "elastic",
    "preference", "distillation", "scores", "reduce_in_bf16", "grpo",
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
    facts["distributed.narrow_tp_sums"] = config.distributed.narrow_tp_sums
    facts |= {f"data.{name}": getattr(config.data, name, None) for name in READ}
    for name, value in _walk("checkpoint", config.checkpoint):
        facts[name] = value is not None if name.split(".")[-1] in PLACES else value
    for name in ("load_hf", "save_hf", "reference_logps", "reference_hf", "teacher_scores", "teacher_hf"):
        facts[name] = getattr(config, name) is not None
    role = config.role
    facts["role"] = None if role is None else [role.name, replace(role.spec, name="", notices=()), role.top_k]
    adapter = config.adapter
    facts["adapter"] = [adapter.load is not None, adapter.save is not None, adapter.merge]
    return facts


def check_agreement(group: Group, facts: Mapping[str, object]) -> None:
    """All ranks of the group have the same facts; otherwise all of them refuse, and name one that differs."""
    facts_of_ranks = group.gather_objects({name: repr(fact) for name, fact in facts.items()}, dict[str, str])
    first_rank, *other_ranks = zip(group.ranks, facts_of_ranks, strict=True)
    for rank, rank_facts in other_ranks:
        for name in dict.fromkeys((*first_rank[1], *rank_facts)):
            if rank_facts.get(name) != first_rank[1].get(name):
                raise UserError(
                    f"rank {rank} has {rank_facts.get(name)}, rank {first_rank[0]} has {first_rank[1].get(name)}",
                    field=name, accepted="the same plan, model, options and data on every rank",
                )  # fmt: skip


def _walk(name: str, value: object) -> Iterator[tuple[str, object]]:
    """A dataclass's fields as ``name.field``; anything else as it is. A whole number in a field of floats is one there,
    as it is on a rank to which another has told it."""
    if not is_dataclass(value):
        yield name, value
        return
    for field in fields(value):
        item = getattr(value, field.name)
        is_whole = field.type in ("float", "float | None") and type(item) is int
        yield from _walk(f"{name}.{field.name}", float(item) if is_whole else item)


PACKAGES = ("hetero_megatron", "hetero_kernels", "hetero_plugins")
DIGITS = 12  # of a hash, in messages


def check_program(group: Group, platform: Platform, plugins: Plugins) -> None:
    """Called on all ranks of the job, which refuse together.

    Chips of unlike vendors may need other releases of torch, and plugins of their own: between them a difference is a
    notice of the first rank.

    Raises:
        UserError: two ranks run other versions or sources, or have chips alike under unlike torch or plugins.
    """
    if group.size == 1:
        return
    own_program = program_facts()
    kind = ".".join(map(str, (platform.name, *chip_arch(platform))))
    programs = group.gather_objects(
        (kind, own_program, environment(plugins)), tuple[str, dict[str, str], dict[str, str]]
    )
    first = programs[0]
    by_kind: dict[str, tuple[int, dict[str, str]]] = {}
    for rank, (chip_kind, program, releases) in zip(group.ranks, programs, strict=True):
        _refuse(program, first[1], rank, group.ranks[0], "the same version of the program, file by file, on every rank")
        other_rank, expected = by_kind.setdefault(chip_kind, (rank, releases))
        _refuse(
            releases, expected, rank, other_rank, f"the same releases on every rank with a chip of the kind {chip_kind}"
        )
    if group.index == 0:
        for chip_kind, (rank, releases) in by_kind.items():
            for name, release, first_release in _unlike(releases, first[2]):
                text = (
                    f"{name}: rank {rank} ({chip_kind}) has {release}, "
                    f"rank {group.ranks[0]} ({first[0]}) has {first_release}"
                )
                print(notice_line(text), flush=True)


def program_facts() -> dict[str, str]:
    """What every rank must have alike, whatever its chip."""
    return {f"version of {PACKAGES[0]}": __version__, f"sources of {PACKAGES[0]}": digest(_files(PACKAGES))}


def environment(plugins: Plugins) -> dict[str, str]:
    """By what messages call it: torch, and every plugin that is no part of this package."""
    releases = {"torch": str(torch.__version__)}
    for plugin in plugins.plugins:
        if plugin.source.origin != "built in":
            version = f"{plugin.source.version} {digest(_plugin_files(plugin.source.module))}".strip()
            releases[f"plugin {plugin.source.name}"] = version if plugin.ok else f"one that is broken: {plugin.error}"
    return releases


def digest(files: Iterable[tuple[str, Path]]) -> str:
    """Of names and contents, in the order of names."""
    hasher = hashlib.sha256()
    for name, path in sorted(files):
        content = path.read_bytes()
        hasher.update(f"{name}\0{len(content)}\0".encode() + content)
    return hasher.hexdigest()[:DIGITS]


def chip_arch(platform: Platform) -> tuple[int, ...]:
    return platform.accelerator.arch(platform.device.index or 0) if platform.accelerator is not None else ()


def _files(packages: Iterable[str]) -> Iterable[tuple[str, Path]]:
    """Sources only: caches, built libraries and tables of measurements may differ between hosts."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            root = Path(folder)
            yield from ((f"{package}/{path.relative_to(root).as_posix()}", path) for path in root.rglob("*.py"))


def _plugin_files(module: str) -> Iterable[tuple[str, Path]]:
    top = module.partition(".")[0]
    path = source_file(top)
    return [(top, path)] if path is not None and path.name != "__init__.py" else _files([top])


def _refuse(mine: Mapping[str, str], other_facts: Mapping[str, str], rank: int, other: int, accepted: str) -> None:
    for name, own_fact, other_fact in _unlike(mine, other_facts):
        raise UserError(f"rank {rank} has {own_fact}, rank {other} has {other_fact}", field=name, accepted=accepted)


def _unlike(mine: Mapping[str, str], other_facts: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    for name in dict.fromkeys((*other_facts, *mine)):
        if mine.get(name) != other_facts.get(name):
            yield name, mine.get(name, "none"), other_facts.get(name, "none")
