"""Which projections of which layers have adapters: by names, layers, or peft's patterns over the names of modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.adapter_choice import choices
from hetero_megatron.spec.adapter_modules import all_modules, default_targets
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.spec.lora import (
    MLP_TARGETS,
    SITE_WORD,
    Lora,
    Place,
    grouped,
    layer_numbers,
    sites_of,
)
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.tensors import logical_tensors

ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the head
SECONDS = 1.0  # in which a pattern must have matched a name or not


def modules(spec: ModelSpec) -> dict[Place, str]:
    """Of each matrix outside of experts in the family's files that may have an adapter, its module's name there."""
    names, modules_found = FAMILIES[spec.hf_model_type].names, dict[Place, str]()
    for tensor in logical_tensors(spec.base):
        for target, fused in () if tensor.per_expert else choices(spec.base, tensor)[:1]:
            source = names.source(spec.base, tensor.name)
            if (fused is not None or source == HFSource(source.name)) and isinstance(tensor.layer, int):
                modules_found[tensor.layer, target] = names.in_transformers(source.name.removesuffix(".weight"))
    return modules_found


def other_modules(spec: ModelSpec) -> list[str]:
    """Of the family's modules with a matrix, those of which no adapter may be: embeddings, heads, routers."""
    names, adaptable = FAMILIES[spec.hf_model_type].names, set(modules(spec).values())
    matrices = [
        names.in_transformers(names.source(spec.base, t.name).name.removesuffix(".weight"))
        for t in logical_tensors(spec.base) if len(t.shape) == 2 and t.name.endswith(".weight")
    ]  # fmt: skip
    return [name for name in dict.fromkeys(matrices) if name not in adaptable]


def matches(pattern: str, name: str, field: str, where: str = "") -> bool:
    """Whether a regular expression is all of a name. UserError: it is none, or takes too long."""
    import regex

    try:
        return regex.fullmatch(pattern, name, timeout=SECONDS) is not None
    except regex.error as error:
        problem, accepted = f"is no regular expression ({error})", "one that Python reads"
    except (RecursionError, OverflowError):
        problem, accepted = "is nested too deep, or repeats too often", "a simpler one"
    except TimeoutError:
        problem, accepted = f"takes longer than {SECONDS:g} s on the name {name}", "one without repeats inside repeats"
    raise UserError(problem, field=field, value=pattern, accepted=accepted, where=where)


@dataclass(frozen=True)
class ModuleChoice:
    """What peft's configuration chooses of modules.

    Attributes:
        targets: ends of names, or one regular expression over whole names; exclude: of those, what is left out.
        layers: numbers, of which alone targets that are ends count; None: all.
        containers: patterns of what holds the layers, the parent of their numbers; (): any.
        where: the file.
    """

    targets: str | tuple[str, ...]
    exclude: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    containers: tuple[str, ...] = ()
    where: str = ""

    def takes(self, name: str) -> bool:
        """As ``peft.tuners.tuners_utils.check_target_module_exists``."""
        if self.excludes(name):
            return False
        if isinstance(self.targets, str) or self.layers is None or name in self.targets:
            return self._named(self.targets, name, "target_modules")
        return self._named(self.targets, name, "target_modules") and self._layer(name) in self.layers

    def excludes(self, name: str) -> bool:
        """Whether it is left out."""
        return self._named(self.exclude, name, "exclude_modules")

    def _named(self, names: str | tuple[str, ...], module: str, field: str) -> bool:
        if isinstance(names, str):
            return bool(names) and matches(names, module, field, self.where)
        return module in names or any(module.endswith(f".{name}") for name in names)

    def _layer(self, name: str) -> int | None:
        """The number in a name, if it follows a container."""
        parts = name.split(".")
        number_index = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
        name_before = ".".join(parts[:number_index])
        in_container = not self.containers or any(
            matches(rf"(?:.*?\.)?(?:{pattern})", name_before, "layers_pattern", self.where)
            for pattern in self.containers
        )
        return int(parts[number_index]) if number_index and in_container else None


def pattern_value(patterns: Mapping[str, Any], name: str, field: str, where: str) -> Any:
    """What ``rank_pattern`` or ``alpha_pattern`` says of a module: that of the first pattern which is its end, or
    None."""
    for pattern, value in patterns.items():
        if matches(rf"(.*\.)?({pattern})", name, field, where):
            return value
    return None


def with_places(spec: ModelSpec, lora: Lora, places: Mapping[Place, tuple[int, float]]) -> Lora:
    """Adapters at some places, (rank, alpha) each, beside those of experts that ``lora`` has: without ``sites`` where
    every layer has the same."""
    targets = {target for _, target in places}
    experts = tuple(t for t in lora.targets if spec.moe is not None and t in MLP_TARGETS)
    same_everywhere = set(places.values()) == {(lora.rank, lora.alpha)}
    all_places = {place for place in _all_places(spec) if place[1] in targets}
    if same_everywhere and all_places == set(places):
        return replace(lora, targets=(*targets, *experts), sites=())
    return replace(lora, targets=(*targets, *experts), sites=grouped(places))


def _all_places(spec: ModelSpec) -> list[Place]:
    tensors = [t for t in logical_tensors(spec.base) if not t.per_expert and isinstance(t.layer, int)]
    places = ((t.layer, name) for t in tensors for name, _ in choices(spec.base, t))
    return list(dict.fromkeys((layer, name) for layer, name in places if isinstance(layer, int)))


def chosen(
    spec: ModelSpec, lora: Lora, targets: Sequence[str] | None, layers: Sequence[str] | None,
    sites: Sequence[str] | None, alpha: float | None = None,
) -> Lora:  # fmt: skip
    """``lora`` with adapters where words of flags say.

    Args:
        targets: names of projections, or one regular expression over names of modules as the family's files have them;
            None: all.
        layers: ``0-3`` or ``7``, which alone have some; None: all.
        sites: as ``SITE_WORD`` says, which say all but of experts.
        alpha: of sites that say none; None: their rank.

    Raises:
        UserError: of ``targets``, ``layers`` or ``sites``.
    """
    if sites:
        if layers:
            raise UserError("says what sites say", field="layers", value=" ".join(layers), accepted="one of the two")
        return _by_words(spec, lora, targets, sites, alpha)
    named = bool(targets) and ALL_LINEAR not in (targets or ())
    if targets is not None and ALL_LINEAR in targets:
        targets = _all_linear(spec, targets)
    if targets is not None and len(targets) == 1 and not targets[0].replace("_", "").isalnum():
        places = _by_pattern(spec, targets[0])
        if layers:
            raise UserError(
                "a regular expression says which layers itself", field="layers", value=" ".join(layers),
                accepted="names of projections as targets, or no layers",
            )  # fmt: skip
    else:
        names = _own_names(spec, targets) if targets else default_targets(spec)
        lora = replace(lora, targets=names)  # checks them
        if not layers:
            return lora
        if experts := [name for name in names if spec.moe is not None and name in MLP_TARGETS]:
            raise UserError(
                f"experts ({experts[0]}) have adapters in all layers or none", field="layers", value=" ".join(layers),
                accepted=f"targets other than {', '.join(MLP_TARGETS)}",
            )  # fmt: skip
        numbers = layer_numbers(" ".join(layers).split(), "layers")
        _check_layers(numbers, "layers", spec)
        places = [place for place in _all_places(spec) if place[0] in numbers and place[1] in names]
        missing_targets = [name for name in names if name not in {target for _, target in places}]
        if missing_targets and named:
            raise UserError(
                f"{spec.name} has no such projection in these layers", field="targets", value=missing_targets[0],
                accepted=", ".join(dict.fromkeys(target for layer, target in _all_places(spec) if layer in numbers)),
            )  # fmt: skip
    return with_places(spec, replace(lora, targets=(places[0][1],)), dict.fromkeys(places, (lora.rank, lora.alpha)))


def _own_names(spec: ModelSpec, targets: Sequence[str]) -> tuple[str, ...]:
    """Of what the family's files call a projection, the projection."""
    projections = {name for _, name in _all_places(spec)}
    called = {stored.rpartition(".")[2]: name for (_, name), stored in modules(spec).items()}
    return tuple(dict.fromkeys(name if name in projections else called.get(name, name) for name in targets))


def _all_linear(spec: ModelSpec, targets: Sequence[str]) -> tuple[str, ...]:
    problem, accepted = "", f"{ALL_LINEAR}, or names of projections: {', '.join(all_modules(spec))}"
    if len(targets) > 1:
        problem = f"{ALL_LINEAR} is all of them"
    elif spec.moe is not None:
        problem = "peft's are of what all tokens share in a mixture of experts, which has none here, and of no experts"
    if problem:
        raise UserError(problem, field="targets", value=" ".join(targets), accepted=accepted)
    return all_modules(spec)


def _by_pattern(spec: ModelSpec, pattern: str) -> list[Place]:
    names = modules(spec)
    places = [place for place, name in names.items() if matches(pattern, name, "targets")]
    if unadaptable := next((name for name in other_modules(spec) if matches(pattern, name, "targets")), None):
        raise UserError(
            f"{unadaptable} may have no adapter", field="targets", value=pattern,
            accepted=f"a regular expression of projections alone, such as {next(iter(names.values()))}",
        )  # fmt: skip
    if not places:
        raise UserError(
            f"no such projection: no module of {spec.name} has such a name", field="targets", value=pattern,
            accepted=f"{', '.join(dict.fromkeys(name for _, name in _all_places(spec)))}, or a regular expression over "
            "whole names such as "
            f"{next(iter(names.values()), 'model.layers.0.self_attn.q_proj')}",
        )  # fmt: skip
    return places


def _by_words(
    spec: ModelSpec, lora: Lora, targets: Sequence[str] | None, words: Sequence[str], alpha: float | None
) -> Lora:
    sites = sites_of(words, lora.rank, alpha)
    _check_layers((n for site in sites for n in site.layers), "sites", spec)
    try:
        template = Lora(lora.rank, lora.alpha, tuple(targets or ()), sites=sites)
    except UserError as error:
        value = error.value if error.field in ("sites", "targets") else f"{error.field} {error.value}"
        raise UserError(error.problem, field="sites", value=value, accepted=error.accepted or SITE_WORD) from None
    places = {
        (layer, name): (site.rank, site.alpha) for site in sites for layer in site.layers for name in site.targets
    }
    missing_targets = [t for t in template.targets if t not in {name for _, name in places}]
    if missing_targets and (spec.moe is None or missing_targets[0] not in MLP_TARGETS):
        raise UserError(
            "sites say nothing of it", field="targets", value=missing_targets[0], accepted="only what sites name"
        )
    model_places = set(_all_places(spec))
    if missing := [place for place in places if place not in model_places]:
        layer, name = missing[0]
        raise UserError(
            f"layer {layer} of {spec.name} has no {name} that may have an adapter of its own", field="sites",
            value=f"{layer}:{name}", accepted=", ".join(dict.fromkeys(t for n, t in model_places if n == layer)),
        )  # fmt: skip
    return with_places(spec, replace(lora, targets=template.targets), places)


def _check_layers(numbers: Iterable[int], field: str, spec: ModelSpec) -> None:
    if layer := next((n for n in numbers if n >= spec.num_layers), None):
        raise UserError(f"is no layer of {spec.name}", field=field, value=layer, accepted=f"0 to {spec.num_layers - 1}")
