"""Low-rank adapters (LoRA): the base is frozen, and some matrices W become W + scale B A with small A and B; with DoRA
each of their rows is scaled to a length of its own, which is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.dropout import check_rate
from hetero_megatron.utils.text import rank_ranges

MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")  # in a mixture of experts, those of the routed experts
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *MLP_TARGETS)
# Of multi-head latent attention, where somebody names them.
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
FEW_BITS_TARGETS = TARGETS + LATENT_TARGETS  # the projections that may be stored in few bits
# What some families keep in one matrix, and modules of linear attention, called as files do.
FUSED_TARGETS = ("qkv_proj", "gate_up_proj", "query_key_value", "input_linear")
LINEAR_TARGETS = (
    "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj", "out_proj", "b_proj",
    "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj",
)  # fmt: skip
EVERY_TARGET = FEW_BITS_TARGETS + FUSED_TARGETS + LINEAR_TARGETS
BASE_DTYPES = ("int8", "nf4")
NF4_BLOCK = 64  # elements of a row that share a largest magnitude, in 4 bits
NF4_BYTES = NF4_BLOCK // 2 + 1  # of a block: two elements each, and how large its largest magnitude is
NF4_GROUP = 256  # blocks whose magnitudes share one
NF4_TABLES = 16 + 256  # numbers that bits stand for
NF4_CHUNK = 1 << 21  # elements that are made of 4 bits at once, and bytes that each takes then: indices, and fp32 twice
NF4_MAKING = 9
RESIDUALS = ("pissa", "olora")
MAX_RANK = 1 << 14
MOST_LAYERS = 1 << 14  # that a choice may name
LEAST_ALPHA, MOST_ALPHA = 1e-6, 1e9  # so that alpha / rank times a product is a number in fp32 and bf16


def nf4_blocks(start: int, stop: int) -> tuple[int, int]:
    """The blocks of a row in which some of its columns are, half-open."""
    return start // NF4_BLOCK, -(-stop // NF4_BLOCK) if stop > start else start // NF4_BLOCK


def all_linear(gated: bool) -> tuple[str, ...]:
    """Every projection of a model whose MLP has a gate or not."""
    return TARGETS if gated else tuple(name for name in TARGETS if name != "gate_proj")


@dataclass(frozen=True)
class Sites:
    """Projections of some layers, whose adapters have a rank and an alpha of their own."""

    layers: tuple[int, ...]
    targets: tuple[str, ...]
    rank: int
    alpha: float

    def word(self) -> str:
        """``0-3,7:q_proj,v_proj:16``, as ``--lora-sites`` has it, without the alpha."""
        return f"{rank_ranges(self.layers)}:{','.join(self.targets)}:{self.rank}"


SITE_WORD = "LAYERS:NAMES[:RANK[:ALPHA]], such as 0-3,7:q_proj,v_proj:16"


def sites_of(words: Iterable[str], rank: int, alpha: float | None = None) -> tuple[Sites, ...]:
    """From what ``SITE_WORD`` says; ``rank``: of those that say none; alpha: likewise, None: their rank. UserError: of
    ``sites``."""
    sites = []
    for word in words:
        layers, *site_values = word.split(":")
        try:
            names, site_rank = site_values[0].split(","), int(site_values[1]) if len(site_values) > 1 else rank
            counts = float(site_values[2]) if len(site_values) > 2 else float(site_rank) if alpha is None else alpha
        except (IndexError, ValueError):
            raise UserError("says no place", field="sites", value=word, accepted=SITE_WORD) from None
        if len(site_values) > 3:
            raise UserError("says too much", field="sites", value=word, accepted=SITE_WORD)
        if unknown := [name for name in names if name not in EVERY_TARGET]:
            problem = f"no projection {unknown[0][:40]}"
            raise UserError(problem, field="sites", value=word, accepted=", ".join(EVERY_TARGET))
        sites.append(Sites(tuple(sorted(layer_numbers(layers.split(","), "sites"))), tuple(names), site_rank, counts))
    return tuple(sites)


def layer_numbers(words: Iterable[str], field: str) -> set[int]:
    """Of ``0-3`` and ``7``. UserError: of ``field``."""
    numbers: set[int] = set()
    for word in words:
        first, dash, end = word.partition("-")
        is_run = first.isascii() and first.isdecimal() and (not dash or end.isascii() and end.isdecimal())
        if not is_run or len(word) > 11 or int(end or first) < int(first) or int(end or first) > MOST_LAYERS:
            raise UserError("is no layer, or run of layers", field=field, value=word, accepted="such as 0-3 7")
        numbers |= set(range(int(first), int(end or first) + 1))
    return numbers


Place = tuple[int, str]  # layer, projection


@lru_cache(maxsize=64)
def _places(sites: tuple[Sites, ...]) -> dict[Place, Sites]:
    return {(layer, target): site for site in sites for layer in site.layers for target in site.targets}


def grouped(places: Mapping[Place, tuple[int, float]]) -> tuple[Sites, ...]:
    """The same choice, from (rank, alpha) of each adapted projection, in the fewest words: in layers that are alike,
    projections with the same rank and alpha are one entry."""
    of_layer: dict[int, dict[tuple[int, float], list[str]]] = {}
    for layer, target in sorted(places, key=lambda place: (place[0], EVERY_TARGET.index(place[1]))):
        of_layer.setdefault(layer, {}).setdefault(places[layer, target], []).append(target)
    layers_of_kinds: dict[tuple[tuple[tuple[str, ...], int, float], ...], list[int]] = {}
    for layer, kinds in of_layer.items():
        layers_of_kinds.setdefault(tuple((tuple(names), *pair) for pair, names in kinds.items()), []).append(layer)
    return tuple(Sites(tuple(layers), *kind) for kinds, layers in layers_of_kinds.items() for kind in kinds)


@dataclass(frozen=True)
class Lora:
    """Adapters of PEFT's kind: A [rank, inputs], B [outputs, rank].

    Attributes:
        targets: projections that have one, in the order of ``EVERY_TARGET``.
        rslora: the scale is alpha / sqrt(rank) instead of alpha / rank.
        dropout: in training, of what A multiplies: each adapter drops other elements.
        dora: output channel i of an adapted matrix is m_i / |row i of W + scale B A| times that row; m is trained, and
            the norm counts as a constant in gradients, as in peft.
        residual: an adapted matrix W counts without its first ``rank`` singular values and vectors (``pissa``: Meng et
            al., 2024) or columns of its QR decomposition (``olora``), with which the adapters began; None: whole.
        base_dtype: in which the frozen projections are stored: ``int8`` with one scale per output channel, ``nf4`` in
            blocks of 64; None: in the run's.
        sites: where only some layers have adapters, or ranks and alphas differ: all that there are, of projections that
            are not those of experts; (): every target in every layer, with ``rank`` and ``alpha``.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False
    dropout: float = 0.0
    base_dtype: str | None = None
    dora: bool = False
    residual: str | None = None
    sites: tuple[Sites, ...] = ()

    def __post_init__(self) -> None:
        _check_size(self.rank, self.alpha)
        seen_places: set[Place] = set()
        for site in self.sites:
            _check_size(site.rank, site.alpha)
            for place in ((layer, target) for layer in site.layers for target in site.targets):
                if place in seen_places:
                    raise UserError("is named twice", field="sites", value=f"layer {place[0]} {place[1]}")
                seen_places.add(place)
        names = (*self.targets, *(target for site in self.sites for target in site.targets))
        object.__setattr__(self, "targets", tuple(dict.fromkeys(names)))
        unknown = [name for name in self.targets if name not in EVERY_TARGET]
        if unknown or not self.targets:
            value = unknown[0] if unknown else "none"
            raise UserError("no such projection", field="targets", value=value, accepted=", ".join(EVERY_TARGET))
        check_rate(self.dropout, "dropout")
        if self.base_dtype not in (None, *BASE_DTYPES):
            accepted = ", ".join(BASE_DTYPES)
            raise UserError("no such dtype", field="base_dtype", value=self.base_dtype, accepted=accepted)
        if self.residual not in (None, *RESIDUALS):
            raise UserError("unknown value", field="residual", value=self.residual, accepted=", ".join(RESIDUALS))
        object.__setattr__(self, "targets", tuple(name for name in EVERY_TARGET if name in self.targets))

    def shape(self) -> dict[str, Any]:
        """What counts for memory and time, as JSON."""
        content: dict[str, Any] = {"rank": self.rank, "targets": self.targets}
        content |= {name: True for name in ("dropout", "dora") if getattr(self, name)}
        content |= {"sites": self.site_words()} if self.sites else {}
        return content | ({"base_dtype": self.base_dtype} if self.base_dtype else {})

    def site_words(self) -> tuple[str, ...]:
        """The sites without what they count, as ``--lora-sites`` has them."""
        rank_only = grouped({place: (site.rank, 1.0) for place, site in _places(self.sites).items()})
        return tuple(site.word() for site in rank_only)

    def site(self, layer: int | str, target: str, of_experts: bool = False) -> Sites | None:
        """The adapter of a projection in a layer; None: it has none."""
        if self.sites and not of_experts:
            return _places(self.sites).get((layer, target)) if isinstance(layer, int) else None
        return Sites((), (target,), self.rank, self.alpha) if target in self.targets else None


def _check_size(rank: Any, alpha: Any) -> None:
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise UserError("out of range", field="rank", value=rank, accepted=f"1 to {MAX_RANK:,}")
    if isinstance(alpha, bool) or not LEAST_ALPHA <= alpha <= MOST_ALPHA:
        accepted = f"a number > 0, from {LEAST_ALPHA:g} to {MOST_ALPHA:g}"
        raise UserError("out of range", field="alpha", value=alpha, accepted=accepted)
