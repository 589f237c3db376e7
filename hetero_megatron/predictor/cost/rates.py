"""Rates: what is known about how fast chips and links are. Read from the cluster file (docs/calibrate.md has the keys
and their units), else from data sheets.

Cold start: what others measured on such a card (``cluster/cards``), else data sheet x default efficiency: products as
measured, half-saturation as vTrain's A100 runs have it, memory 0.85 (A100 0.854), links 0.8 (NVLink 0.86, NIC 0.77).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hetero_megatron.cluster import Chip, Cluster, Link
from hetero_megatron.cluster.catalogue import card_file
from hetero_megatron.cluster.rates_section import LEAST, MODEL_TABLES, MOST, TABLES
from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.cost_options import ShareOfPeak, share_of_peak
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.cached_method import cached_method
from hetero_megatron.utils.yaml_document import Entry, from_data

ATTENTION = 0.6  # of the products' rate: flash kernels, forward and backward together
MEMORY_BANDWIDTH, LINK_BANDWIDTH = 0.85, 0.8
HALF = 300  # half-saturation of m and of min(n, k) on A100; the same fit gave 350 and 360
HALF_FLOPS = 2.7e14  # what A100 reaches; in proportion below, as Zorse's cards have it, and no more above
LAYER_SECONDS, ACTION_SECONDS, MESSAGE_SECONDS, STEP_SECONDS = 100e-6, 50e-6, 10e-6, 5e-3
CORE_FLOPS, CORE_BYTES = 5e10, 6e9  # one CPU core (emulated chips, speed 1.0): assumed; calibrate measures it
# Context and libraries of an accelerator: assumed; of a CPU, on top of the process before the model is built.
OVERHEAD_BYTES, CORE_OVERHEAD_BYTES = 1 << 29, 64 << 20
LATENCY = {"intra": 10e-6, "inter": 20e-6}  # where the cluster file gives none (Calculon's values)
COLLECTIVES = ("all_to_all", "exchange")
FAMILIES = ("layers", "split", "waiting", "attention", "visits", "optimizer", "exchange")  # with a spread of their own
POSITIVE = ("gemm_flops", "bytes_per_second", "attention_flops", "gradient_speed")
LINK_KEYS = ("within", "between", "from", "to", "alpha", "beta", "message_seconds", "collectives", "spread", "source")
Row = tuple[float, ...]


@dataclass(frozen=True)
class LayerRow:
    """Measured seconds of one layer (or embedding, head, recompute) on one rank that has 1/tp of it; or of what a TP
    group's ranks wait for each other; or of B_INPUT (``forward``) and W (``backward``)."""

    fingerprint: str
    tp: float
    micro_batch_size: float
    seq_length: int
    forward: float
    backward: float


@dataclass(frozen=True)
class ChipRates:
    """Rates of one chip and dtype, in the units of docs/calibrate.md. ``calibrated``: anything was measured."""

    chip: str
    dtype: str
    gemm_flops: float
    attention_flops: float
    bytes_per_second: float
    gemm_half: float = 0.0
    layer_seconds: float = 0.0
    action_seconds: float = 0.0
    message_seconds: float = 0.0
    step_seconds: float = 0.0
    overhead_bytes: float = 0.0
    gemm: tuple[Row, ...] = ()
    gemm_backward: tuple[Row, ...] = ()
    attention: tuple[Row, ...] = ()
    layers: tuple[LayerRow, ...] = ()
    embed: tuple[LayerRow, ...] = ()
    head: tuple[LayerRow, ...] = ()
    optimizer: tuple[Row, ...] = ()
    newton_schulz: tuple[Row, ...] = ()  # of a matrix, in Muon's update
    visits: tuple[Row, ...] = ()
    waiting: tuple[LayerRow, ...] = ()
    split_layers: tuple[LayerRow, ...] = ()
    split_head: tuple[LayerRow, ...] = ()
    elementwise: tuple[LayerRow, ...] = ()
    selective: tuple[LayerRow, ...] = ()
    decode_layers: tuple[LayerRow, ...] = ()  # of a token that is generated, of some sequences at once …
    decode_head: tuple[LayerRow, ...] = ()  # … and what it takes beside its layers, the draw among it
    experts: tuple[tuple[Any, ...], ...] = ()
    calibrated: bool = False
    score_seconds: float = 0.0
    layer_backward_seconds: float = 0.0
    gradient_speed: float = 1.0  # of products' gradients, of ``gemm_flops``
    pack_beta: float = 0.0
    add_beta: float = 0.0
    unpack_beta: float = 0.0
    exchange_seconds: float = 0.0
    accumulate_beta: float = 0.0
    jitter: float = 0.0
    split_seconds: float = 0.0
    spread: Mapping[str, float] = field(default_factory=dict)  # by family; none where nothing was measured

    @property
    def pack(self) -> float:
        """Seconds per byte packed: read and written."""
        return self.pack_beta or 2 / self.bytes_per_second

    @property
    def add(self) -> float:
        """Seconds per byte added to a sum: two read, one written."""
        return self.add_beta or 3 / self.bytes_per_second

    @property
    def unpack(self) -> float:
        return self.unpack_beta or 2 / self.bytes_per_second

    @property
    def host(self) -> tuple[float, float, float, float]:
        """Seconds per byte packed, added to a sum and unpacked, and seconds of an exchange, however small."""
        return self.pack, self.add, self.unpack, self.exchange_seconds


NUMBERS = tuple(f.name for f in fields(ChipRates) if f.type == "float")


@dataclass(frozen=True)
class LinkRates:
    """One direction of a link: ``alpha`` seconds per message, ``beta`` seconds per byte, ``message_seconds`` on the
    host (None: the chips' own); (alpha, beta) of ``all_to_all`` and of a TP group's ``exchange``, with what starting it
    takes, where these were measured. ``same_node``: the bandwidth is each chip's own; otherwise it is that of a
    node's network cards together, which its chips share. ``alone``: seconds per byte that one chip's messages take
    more than those of all chips of its node together, where they go through hosts. ``spread``: relative standard
    deviation of a large message's seconds; None: not measured."""

    alpha: float
    beta: float
    message_seconds: float | None = None
    all_to_all: tuple[float, float] | None = None
    same_node: bool = False
    calibrated: bool = False
    exchange: tuple[float, float] | None = None
    alone: float = 0.0
    spread: float | None = None

    def collective(self, name: str | None) -> tuple[float, float]:
        """(alpha, beta) of an ``all_to_all`` or a TP group's ``exchange``, as far as measured; None: of a message."""
        if name == "exchange" and self.exchange is not None:
            return self.exchange
        return self.all_to_all if name and self.all_to_all is not None else (self.alpha, self.beta)

    def between_chips(self, name: str | None) -> float:
        """Seconds per byte from one chip to another, in such a collective."""
        return self.collective(name)[1] + self.alone

    def as_link(self) -> Link:
        return Link(1 / self.beta if self.beta else float("inf"), self.alpha)


def scaled_rows(table: str, rows: Sequence[Row | LayerRow], factor: float) -> tuple[Row | LayerRow, ...]:
    """The rows of one of ``TABLES`` with all their seconds multiplied."""
    n = TABLES[table][1]
    return tuple(
        replace(row, forward=row.forward * factor, backward=row.backward * factor)
        if isinstance(row, LayerRow)
        else (*row[:-n], *(x * factor for x in row[-n:]))
        for row in rows
    )


def model_fingerprint(spec: ModelSpec) -> str:
    """12 hex digits of what one layer, the embedding and the head are: everything but depth, names and positions."""
    data = spec.shape()
    del data["num_layers"]
    data.pop("mtp_layers", None)  # modules are layers, and rows of the head
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Rates:
    """All rates of a cluster for one dtype: ``chips`` by name; links by :meth:`link`. ``fp8``: of the chips that also
    have this, with a recipe of fp8."""

    cluster: Cluster
    dtype: str
    chips: Mapping[str, ChipRates]
    measured: Mapping[tuple[str, str, bool], LinkRates] = field(default_factory=dict)
    fp8: Mapping[str, ChipRates] = field(default_factory=dict)

    def link(self, a: int, b: int) -> LinkRates:
        """The link from rank ``a`` to rank ``b``; UserError where nothing is known about it."""
        first, second = self.cluster.ranks[a], self.cluster.ranks[b]
        return self.between(first.group, second.group, first.node == second.node)

    @cached_method
    def between(self, group: str, other: str, same_node: bool = False) -> LinkRates:
        """The link between two chips of one node (of ``group``), or between two nodes of these groups."""
        return self.measured.get((group, other, same_node)) or self._data_sheet(group, other, same_node)

    def _data_sheet(self, group: str, other: str, same_node: bool) -> LinkRates:
        cluster = self.cluster
        a, b = cluster.groups[group], cluster.groups[other]
        chip = cluster.chips[a.chip]
        link = cluster.link_inside(group) if same_node else cluster.link_between(group, other)
        if link is None:
            between = f"inside a node of {group}" if same_node else f"between nodes of {group} and {other}"
            key = "links.intra_node" if same_node else "links.inter_node"
            raise UserError(
                f"nothing is known about the link {between}", field=key, where=cluster.file,
                accepted=f"{key}: {{bandwidth: 25 GB/s, latency: 10 us}}, or rates that calibrate wrote",
            )  # fmt: skip
        written = link is cluster.intra_node or not same_node
        # What a file of an emulated cluster says is what is set up, so it is taken as it is.
        exact = link.emulated is not None or chip.speed is not None
        rate = link.emulated or link.bandwidth * (1.0 if exact else LINK_BANDWIDTH)
        alpha = link.latency if written and link.latency else LATENCY["intra" if same_node else "inter"]
        alpha = alpha if link.emulated_latency is None else link.emulated_latency
        share = 1.0 if exact else LINK_BANDWIDTH
        alpha += cluster.first_chunk_seconds(link, a, b)
        shared_beta, single_beta = (
            cluster.seconds_per_byte(link, a, b, shared, rate, share) for shared in (not same_node, False)
        )
        return LinkRates(alpha, shared_beta, same_node=same_node, alone=single_beta - shared_beta)


def load_rates(cluster: Cluster, dtype: str, recipe: str | None = None) -> Rates:
    """The rates of every chip of ``cluster`` that computes in ``dtype``; ``recipe``: and in fp8, if so.

    Raises:
        UserError: a malformed row, or a chip about which neither rates nor a data sheet say enough.
    """
    section = cluster.rates.get("chips", {})
    from_data(section, "rates.chips", cluster.file).mapping(cluster.chips)
    refuse_twice(cluster, section)
    chips, fp8 = {}, {}
    for name, chip in cluster.chips.items():
        stated = {**section.get(name, {}), **chip.rates}
        if dtype in chip.dtypes:
            chips[name] = chip_rates(chip, dtype, stated.get(dtype, {}), cluster)
        if name in chips and recipe is not None and "fp8" in chip.dtypes:
            fp8[name] = _fp8_rates(chips[name], chip, recipe, stated.get(f"fp8_{recipe}", {}), cluster)
    return Rates(cluster, dtype, chips, measured_links(cluster), fp8)


def _fp8_rates(plain: ChipRates, chip: Chip, recipe: str, given: Any, cluster: Cluster) -> ChipRates:
    """``plain``: the chip's rates in the dtype of the run, which it moves bytes with."""
    section = f"fp8_{recipe}"
    values = given_rates(chip.name, section, _with_card(chip, section, given), cluster)
    stated = {"bytes_per_second": plain.bytes_per_second, **values}
    return replace(_cold_start(chip, "fp8", stated, cluster), **stated, calibrated=bool(given))


def refuse_twice(cluster: Cluster, section: Mapping[str, Any]) -> None:
    """``section``: rates by chip and dtype as ``calibrate`` writes them, under ``rates.chips`` of the cluster's file.

    Raises:
        UserError: rates of a chip that its own entry also gives, which one of the two would hide; or no mapping.
    """
    for name, chip in cluster.chips.items():
        of_entry, of_section = (
            from_data(rates, path, cluster.file).any_mapping()
            for rates, path in ((chip.rates, f"chips.{name}.rates"), (section.get(name, {}), f"rates.chips.{name}"))
        )
        if twice := [dtype for dtype in of_section if dtype in of_entry]:
            raise UserError(
                f"rates.chips.{name}.{twice[0]}, where calibrate writes, would be a second set of the same rates",
                field=f"chips.{name}.rates.{twice[0]}", where=cluster.file, accepted="one of the two",
            )  # fmt: skip


def chip_rates(chip: Chip, dtype: str, given: Any, cluster: Cluster) -> ChipRates:
    """Rates of one chip: what ``given`` says, else the data sheet's."""
    values = given_rates(chip.name, dtype, _with_card(chip, dtype, given), cluster)
    if "layer_seconds" in values:
        values.setdefault("layer_backward_seconds", 2 * values["layer_seconds"])
    return replace(_cold_start(chip, dtype, values, cluster), **values, calibrated=bool(given))


def _with_card(chip: Chip, section: str, given: Any) -> Any:
    """``given``, and what others measured on such a card where it says nothing. What tells how fast products are is
    taken together, or not at all."""
    if card_file(chip.name) is None or not isinstance(given, Mapping):
        return given
    from hetero_megatron.cluster.card_entries import PRODUCTS, measured_rates

    card = measured_rates(chip, section)
    if "gemm_flops" in card:  # of large products
        card.setdefault("gemm_half", half_saturation(card["gemm_flops"]))
    stated = {*given, *(PRODUCTS if not given.keys().isdisjoint(PRODUCTS) else ())}
    return {**{key: value for key, value in card.items() if key not in stated}, **given}


def given_rates(chip: str, dtype: str, given: Any, cluster: Cluster) -> dict[str, Any]:
    """The fields of :class:`ChipRates` that an entry of ``rates.chips`` holds, checked; all tables, empty or not."""
    return checked_rates(from_data(given, f"rates.chips.{chip}.{dtype}", cluster.file), dtype)


def checked_rates(entry: Entry, dtype: str) -> dict[str, Any]:
    """The same of any mapping of rates; ``measured``, the facts of a calibration, is no rate."""
    tables = [table for table in TABLES if table != "gemm_backward" or dtype.startswith("fp8_")]
    keys = entry.mapping((*NUMBERS, *tables, "spread", "measured"))
    values: dict[str, Any] = {k: keys[k].number(LEAST * (k in POSITIVE), MOST) for k in NUMBERS if k in keys}
    if "spread" in keys:  # files once had one number, that of an action
        spread = keys["spread"]
        families = spread.mapping(FAMILIES) if isinstance(spread.value, dict) else {"layers": spread}
        values["spread"] = {family: entry.number(0, MOST) for family, entry in families.items()}
    for table in TABLES:
        rows = [_row(row, table) for row in keys[table].items()] if table in keys else []
        values[table] = tuple(LayerRow(*row) for row in rows) if table in MODEL_TABLES else tuple(rows)
    return values


def _row(entry: Entry, table: str) -> tuple[Any, ...]:
    cells, width, names = entry.items(), sum(TABLES[table]), int(table in (*MODEL_TABLES, "experts"))
    if len(cells) != width:
        entry.fail("a row of another length", accepted=f"lists of {width} values")
    return (*(str(cell.value) for cell in cells[:names]), *(cell.number(LEAST, MOST) for cell in cells[names:]))


def _cold_start(chip: Chip, dtype: str, given: Mapping[str, Any], cluster: Cluster) -> ChipRates:
    """Data sheet x default efficiencies; what ``given`` holds need not be on the data sheet."""
    if chip.speed is not None:
        speed = chip.speed
        core = CORE_FLOPS * speed * (0.5 if dtype == "fp64" else 1.0)
        return ChipRates(
            chip.name, dtype, core, 0.5 * core, CORE_BYTES * speed, overhead_bytes=CORE_OVERHEAD_BYTES,
            action_seconds=ACTION_SECONDS, message_seconds=MESSAGE_SECONDS, step_seconds=STEP_SECONDS,
        )  # fmt: skip
    peak, share = chip.flops.get(dtype), share_of_peak(chip.name, dtype)
    if "gemm_flops" in given or given["gemm"]:
        share = ShareOfPeak(share.value)  # gradients are as fast as what is stated
    rate = given.get("gemm_flops") or (peak * share.value if peak else None)
    if rate is None and given["gemm"]:
        rate = max(2 * m * n * k / seconds for m, n, k, seconds in given["gemm"])
    if rate is None:
        raise UserError(
            f"nothing says how fast this chip is in {dtype}", field=f"chips.{chip.name}.tflops", where=cluster.file,
            accepted=f"tflops: {{{dtype}: 100}} (dense), or rates that `hetero-megatron calibrate` wrote",
        )  # fmt: skip
    memory = given.get("bytes_per_second") or (chip.memory_bandwidth or 0) * MEMORY_BANDWIDTH
    if not memory:
        raise UserError(
            "nothing says how fast its memory is", field=f"chips.{chip.name}.memory_bandwidth", where=cluster.file,
            accepted="memory_bandwidth: 2 TB/s, or rates that `hetero-megatron calibrate` wrote",
        )  # fmt: skip
    half = 0.0 if "gemm_flops" in given else half_saturation(rate)
    return ChipRates(
        chip.name, dtype, rate * share.forward / share.value, rate * ATTENTION, memory, half, LAYER_SECONDS,
        ACTION_SECONDS, MESSAGE_SECONDS, STEP_SECONDS, OVERHEAD_BYTES,
        layer_backward_seconds=2 * LAYER_SECONDS, gradient_speed=share.gradients,
    )  # fmt: skip


def half_saturation(flops: float) -> float:
    """At which size products reach half the rate ``flops`` of large ones: slower chips are filled by smaller ones."""
    return HALF * min(1.0, flops / HALF_FLOPS)


def measured_links(cluster: Cluster) -> dict[tuple[str, str, bool], LinkRates]:
    """By (group, group, inside a node): those that the cluster file has rates of."""
    groups = cluster.groups
    both_ways: dict[tuple[str, str, bool], LinkRates] = {}
    one_way: dict[tuple[str, str, bool], LinkRates] = {}
    links = from_data(cluster.rates.get("links", []), "rates.links", cluster.file)
    for entry in links.items():
        keys = entry.mapping(LINK_KEYS, required=("beta",))
        inside = "within" in keys
        named = [keys[key] for key in (("within", "within") if inside else ("from", "to")) if key in keys]
        ends = [end.value for end in (keys["between"].items() if "between" in keys else named)]
        if len(ends) != 2 or any(end not in groups for end in ends):
            accepted = "node groups " + ", ".join(groups)
            entry.fail("a link is within a node group, between two, or from one to another", accepted=accepted)
        rates = _link_rates(keys, inside)
        a, b = ends
        target = one_way if "from" in keys else both_ways
        target[a, b, inside] = rates
        if "from" not in keys:
            target[b, a, inside] = rates
    return both_ways | one_way


def _link_rates(keys: Mapping[str, Entry], same: bool) -> LinkRates:
    def number(entries: Mapping[str, Entry], key: str) -> float:
        return entries[key].number(0, MOST) if key in entries else 0.0

    options: dict[str, Any] = {key: number(keys, key) for key in ("message_seconds", "spread") if key in keys}
    for name, row in (keys["collectives"].mapping(COLLECTIVES) if "collectives" in keys else {}).items():
        pair = row.mapping(("alpha", "beta"))
        options[name] = number(pair, "alpha"), number(pair, "beta")
    return LinkRates(number(keys, "alpha"), number(keys, "beta"), same_node=same, calibrated=True, **options)
