"""The keys of adapter_config.json that choose modules of some layers, or give some of them other ranks and alphas."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hetero_megatron.checkpoint.adapter_experts import GATE_UP, doubled, parameters, parent
from hetero_megatron.errors import UserError
from hetero_megatron.spec import Lora, ModelSpec
from hetero_megatron.spec.adapter_places import ModuleChoice, modules, other_modules, pattern_value, with_places
from hetero_megatron.spec.lora import LEAST_ALPHA, MAX_RANK, MLP_TARGETS, MOST_ALPHA, Sites
from hetero_megatron.utils.foreign_keys import is_one_of

MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # its experts' modules, as released
PATTERNS = ("rank_pattern", "alpha_pattern")
_CHOOSING = ("layers_to_transform", "layers_pattern", "exclude_modules")


def site_keys(spec: ModelSpec, sites: tuple[Sites, ...], plain: list[str]) -> dict[str, Any]:
    """The keys that say which modules have adapters; ``plain``: the family's names of their projections."""
    lora, names = spec.lora, modules(spec)
    assert lora is not None
    places = {(layer, name): site for site in sites for layer in site.layers for name in site.targets}
    layers, ends = sorted({layer for layer, _ in places}), {name for _, name in places}
    experts = lora.dora and spec.moe is not None and any(name in MLP_TARGETS for name in lora.targets)
    # Layers are chosen of all modules, and those of experts, in DoRA's files, are modules of every layer.
    uniform = len(places) == len(layers) * len(ends) and not (experts and len(layers) < spec.num_layers)
    keys: dict[str, Any] = {"target_modules": plain if uniform else [names[place] for place in sorted(places)]}
    if uniform and len(layers) < spec.num_layers:
        keys["layers_to_transform"] = layers
    for key, usual in (("rank", lora.rank), ("alpha", lora.alpha)):
        value_of_place = {names[place]: getattr(site, key) for place, site in sorted(places.items())}
        if unusual := {name: value for name, value in value_of_place.items() if value != usual}:
            keys[f"{key}_pattern"] = unusual
    return keys


def with_sites(entries: Mapping[str, Any], lora: Lora, where: str, spec: ModelSpec) -> Lora:
    """``lora``, whose targets and usual rank and alpha are the file's, with what its other keys choose, as peft reads
    them.

    Raises:
        UserError: a key of another type, layers that the model does not have, modules that may have no adapter.
    """
    names, patterns = modules(spec), _patterns(entries, where, spec)
    _check_experts(entries, lora, where, spec)
    target_modules, listed = entries.get("target_modules"), _listed(entries, spec)
    by_layer = [name for name in listed if "." in name and any(part.isdigit() for part in name.split("."))]
    if not (by_layer or isinstance(target_modules, str) and target_modules != "all-linear"
            or any(entries.get(key) not in (None, [], "") for key in _CHOOSING) or any(patterns.values())):  # fmt: skip
        return lora
    choice = _choice(entries, where, spec, listed)
    places = [place for place, name in names.items() if choice.takes(name)]
    if choice.layers is None:
        _all_known(choice, spec, where)
    experts = spec.moe is not None and any(t in MLP_TARGETS for t in lora.targets)
    if not places and (not experts or listed):
        raise UserError(
            f"choose no projection of {spec.name}", field="target_modules", value=target_modules, where=where,
            accepted=f"what is among its modules, such as {next(iter(names.values()), 'none')}",
        )  # fmt: skip
    return with_places(spec, lora, {place: _sizes(patterns, names[place], lora, where) for place in places})


def _sizes(patterns: Mapping[str, Mapping[str, Any]], name: str, lora: Lora, where: str) -> tuple[int, float]:
    rank, alpha = (pattern_value(patterns[key], name, key, where) for key in PATTERNS)
    rank, alpha = lora.rank if rank is None else rank, lora.alpha if alpha is None else alpha
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise UserError("no such rank", field="rank_pattern", value=rank, accepted=f"1 to {MAX_RANK:,}", where=where)
    if type(alpha) not in (int, float) or not LEAST_ALPHA <= alpha <= MOST_ALPHA:
        accepted = f"a number from {LEAST_ALPHA:g} to {MOST_ALPHA:g}"
        raise UserError("no such alpha", field="alpha_pattern", value=alpha, accepted=accepted, where=where)
    return rank, float(alpha)


def _patterns(entries: Mapping[str, Any], where: str, spec: ModelSpec) -> dict[str, Mapping[str, Any]]:
    """Of modules, those of experts' parameters left out."""
    out, of_experts = dict[str, Mapping[str, Any]](), parameters(spec)
    for key in PATTERNS:
        pattern = entries.get(key) or {}
        if not isinstance(pattern, dict):
            raise UserError("is no object", field=key, value=pattern, accepted='such as {"q_proj": 4}', where=where)
        out[key] = {name: value for name, value in pattern.items() if name.rpartition(".")[2] not in of_experts}
    return out


def experts_patterns(entries: Mapping[str, Any], key: str, spec: ModelSpec) -> dict[str, Any]:
    """Of ``rank_pattern`` or ``alpha_pattern``, by parameter of experts."""
    pattern = entries.get(key)
    ends = {name.rpartition(".")[2]: value for name, value in pattern.items()} if isinstance(pattern, dict) else {}
    return {name: value for name, value in ends.items() if name in parameters(spec)}


def is_even(pattern: Mapping[str, Any], value: Any) -> bool:
    """Whether a pattern says ``value`` for all that it names."""
    return all(is_one_of(value, (one,)) for one in pattern.values())


def _check_experts(entries: Mapping[str, Any], lora: Lora, where: str, spec: ModelSpec) -> None:
    """Ranks and alphas of experts are the same everywhere, but for gate and up where they are joined to one of twice
    the rank that counts as much; nothing chooses layers of them."""
    if spec.moe is None or not any(t in MLP_TARGETS for t in lora.targets):
        return
    twice: tuple[Mapping[str, Any], Mapping[str, Any]] = doubled(lora)
    by_key = {key: experts_patterns(entries, key, spec) for key in PATTERNS}
    if not (is_even(by_key["rank_pattern"], lora.rank) and is_even(by_key["alpha_pattern"], lora.alpha)):
        for key, values_of_targets in zip(PATTERNS, twice, strict=True):
            value = by_key[key].get(GATE_UP) if len(by_key[key]) == 1 else None
            if not isinstance(value, int | float) or not math.isclose(value, *values_of_targets.values()):
                joined = f", or rank_pattern {json.dumps(twice[0])}, alpha_pattern {json.dumps(twice[1])}"
                raise UserError(
                    "all adapters of experts have one rank and alpha here", field=key, value=entries.get(key),
                    accepted=f"none{joined if spec.gated else ''}", where=where,
                )  # fmt: skip
    module_names = [f"model.layers.{i}.{parent(spec)}" for i in range(spec.num_layers)]
    all_names = [f"{name}.{end}" for name in module_names for end in (
        "", *parameters(spec), *(f"0.{t}" for t in MLP_TARGETS), *(f"0.{t}" for t in MIXTRAL))]  # fmt: skip
    all_names = [name.removesuffix(".") for name in all_names]
    for key, patterns in _patterns(entries, where, spec).items():
        usual_value = lora.rank if key == "rank_pattern" else lora.alpha
        for name in all_names:
            if (value := pattern_value(patterns, name, key, where)) not in (None, usual_value):
                raise UserError(
                    f"all adapters of experts have one rank and alpha here ({name})", field=key, value=value,
                    accepted=f"patterns of other modules, or {usual_value:g}", where=where,
                )  # fmt: skip
    left_out = ModuleChoice((), _names(entries, "exclude_modules", where))
    modules_named = [name for name in entries.get("target_modules") or () if _of_experts(str(name))]
    if (
        modules_named
        and _layers(entries, where, spec) is not None
        or any(left_out.excludes(name) for name in all_names)
    ):
        key = "layers_to_transform" if modules_named else "exclude_modules"
        raise UserError(
            "experts have adapters in all layers or none", field=key, value=entries.get(key), where=where,
            accepted="a choice among other modules",
        )  # fmt: skip


def _of_experts(name: str) -> bool:
    end = name.rpartition(".")[2]
    return end in MLP_TARGETS or end in MIXTRAL


def _listed(entries: Mapping[str, Any], spec: ModelSpec) -> tuple[str, ...]:
    """Ends of names of modules that have adapters, those of experts left out."""
    target_modules = entries.get("target_modules")
    if target_modules == "all-linear":
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in modules(spec).values()))
    names = target_modules if isinstance(target_modules, list) else []
    return tuple(name for name in names if spec.moe is None or not _of_experts(name))


def _names(entries: Mapping[str, Any], key: str, where: str) -> str | tuple[str, ...]:
    """A regular expression, or names."""
    names = entries.get(key)
    if names is None or isinstance(names, str):
        return names or ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError("is no list of names", field=key, value=names, accepted="names, or one pattern", where=where)
    return tuple(names)


def _layers(entries: Mapping[str, Any], where: str, spec: ModelSpec) -> tuple[int, ...] | None:
    layers = entries.get("layers_to_transform")
    if layers is None or layers == []:
        return None
    numbers = layers if isinstance(layers, list) else [layers]
    for number in numbers:
        if type(number) is not int or not 0 <= number < spec.num_layers:
            raise UserError(
                f"is no layer of {spec.name}", field="layers_to_transform", value=number, where=where,
                accepted=f"0 to {spec.num_layers - 1}",
            )  # fmt: skip
    return tuple(numbers)


def _choice(entries: Mapping[str, Any], where: str, spec: ModelSpec, listed: tuple[str, ...]) -> ModuleChoice:
    target_modules, layers = entries.get("target_modules"), _layers(entries, where, spec)
    containers, left_out = (_names(entries, key, where) for key in ("layers_pattern", "exclude_modules"))
    if containers and layers is None:
        raise UserError(
            "says nothing without layers_to_transform", field="layers_pattern", value=containers, where=where,
            accepted="both, or none",
        )  # fmt: skip
    by_pattern = isinstance(target_modules, str) and target_modules != "all-linear"
    if by_pattern and layers is not None:
        raise UserError(
            "a regular expression as target_modules says which layers itself", field="layers_to_transform",
            value=entries["layers_to_transform"], where=where, accepted="null, or a list of names as target_modules",
        )  # fmt: skip
    parents = (containers,) if isinstance(containers, str) else containers
    return ModuleChoice(str(target_modules) if by_pattern else listed, left_out, layers, parents, where)


def _all_known(choice: ModuleChoice, spec: ModelSpec, where: str) -> None:
    """UserError: the choice takes what may have no adapter, or a name of it is nothing's."""
    if unadaptable := next((name for name in other_modules(spec) if choice.takes(name)), None):
        raise UserError(
            f"{unadaptable} may have no adapter", field="target_modules", value=choice.targets, where=where,
            accepted=f"projections alone, such as {next(iter(modules(spec).values()), 'none')}",
        )  # fmt: skip
    names = modules(spec).values()
    for end in () if isinstance(choice.targets, str) else choice.targets:
        if not any(name == end or name.endswith(f".{end}") for name in names):
            raise UserError(
                f"{spec.name} has no such module", field="target_modules", value=end, where=where,
                accepted=f"ends of names such as {next(iter(names), 'none')}",
            )  # fmt: skip
