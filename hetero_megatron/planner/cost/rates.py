"""Rates: what is known about how fast chips and links are. Read from the cluster file, else from data sheets.

A cluster file holds rates under ``rates:`` (or, for one chip and dtype, under ``chips: <chip>: rates:``, without its
name; not both)::

    rates:
      chips:
        <chip>:
          <dtype>:                       # fp64 | fp32 | bf16 | fp16; fp8_tensorwise, fp8_blockwise: see below
            gemm: [[m, n, k, seconds], …]             # one product [m, k] x [k, n]
            gemm_flops: 2.1e14                        # or: achieved FLOP/s of large products …
            gemm_half: 300                            # … times m/(m + half) and min(n, k)/(min(n, k) + half); default 0
            attention: [[length, heads, head_dim, forward s, backward s], …]   # causal, one sequence
            visits: [[queries, heads, head_dim, forward s, backward s], …]   # a block of keys in the ring, less FLOPs
            attention_flops: 1.5e14                   # or: achieved FLOP/s over the visible pairs
            bytes_per_second: 1.2e12                  # of bandwidth-bound operators (read + written)
            score_seconds: 0.0                        # per (head, query, key), where kernels write the scores out
            layer_seconds: 0.0                        # least host seconds per layer (launches), forward …
            layer_backward_seconds: 0.0               # … and backward (default: twice)
            action_seconds: 0.0                       # fixed host seconds per F or B of a stage …
            split_seconds: 0.0                        # … and per W, where B is split into B_INPUT and W
            message_seconds: 0.0                      # host seconds that one send or receive costs the rank itself
            step_seconds: 0.0                         # fixed host seconds per optimizer step
            pack_beta: 0.0                            # s per byte packed for an exchange; these four: 0 = from
            add_beta: 0.0                             # … bytes_per_second; per byte received or own and summed
            unpack_beta: 0.0                          # s per byte of parameters received, written in place
            exchange_seconds: 0.0                     # fixed host seconds of packing or unpacking one bucket
            accumulate_beta: 0.0                      # s per byte of weights: what the first backward of a step saves
            jitter: 0.0                               # of t seconds of compute the standard deviation is jitter x t^0.5
            spread: {layers: 0.01, optimizer: 0.02}   # relative standard deviation of what was measured, by family
            overhead_bytes: 0                         # memory that the framework takes before any tensor
            layers: [[fingerprint, tp, micro_batch_size, seq_length, forward s, backward s], …]
            embed: / head:                            # rows like layers; head is final norm, output matrix and loss
            split_layers: / split_head:               # rows like layers, of B_INPUT and W instead of forward, backward
            waiting:                                  # rows like layers, of one exchange of a TP group: see below
            optimizer: [[elements, seconds], …]       # one update of so many owned elements
            experts: [[fingerprint, columns, s, …], …]  # of routed experts of so many columns, see below
      links:
        - {within: <node group>, alpha: s, beta: s_per_byte}                   # inside one node of the group
        - {between: [<group>, <group>], alpha: s, beta: s_per_byte, message_seconds: s,
           collectives: {all_to_all: {alpha: s, beta: s_per_byte}, exchange: {alpha: s, beta: s_per_byte}},
           spread: 0.01}                                                        # both directions
        - {from: <group>, to: <group>, alpha: s, beta: s_per_byte}             # one direction, wins over ``between``

All rows of layers, embed and head are compute of one rank (its 1/tp share), without communication and without
recompute. ``waiting`` is what a TP group's exchange takes in a running pipeline beyond what its links explain: its
ranks wait for each other (none is steady, and they meet several times a layer). ``experts`` is what a layer of
routed experts takes more for one expert, for one row (a token at one of its experts), for one rank more that exchanges
tokens, for one token sent or received, and for one exchange: forward and backward of each, ten numbers.
``fingerprint`` is :func:`model_fingerprint`. Whole-layer rows win over operator rates; a size that was not measured
takes the nearest rows, scaled by the operator rates.

Linear modules in fp8 have sections of their own, ``fp8_tensorwise`` and ``fp8_blockwise`` after the recipe: ``gemm`` of
whole products (both operands quantised, [m, n, k, seconds] of x [m, k] and w [n, k]), or ``gemm_flops`` and
``gemm_half`` of the product alone; ``layers`` and ``split_layers`` of runs in fp8. All else is taken from the section
of the run's dtype.

Cold start: data sheet x default efficiency. Matrix products: achievable share of peak ("MAMF") as tabulated in
stas00/ml-engineering and FlagPerf, for very large products in 16 bit, and taken for fp32 and fp64 too; half-saturation
at 300, as fits of vTrain's A100 runs have it (h/tp of 290-455). Fitted to Megatron's four published times with full
recompute, the plateau is 1.04 x MAMF. Memory: 0.85 of the data sheet (A100 measured 0.854). Links: 0.8 (A100 NVLink
0.86, 200 Gb NIC 0.77).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_megatron.cluster import Chip, Cluster, Link
from hetero_megatron.cluster.rates_section import SECONDS
from hetero_megatron.errors import UserError
from hetero_megatron.spec import ModelSpec

MAMF = {  # measured share of dense 16-bit peak, by the beginning of the chip's name; the longest match counts
    "A100-80-PCIe": 0.811, "A100-40": 0.831, "A100": 0.869, "A800": 0.869, "H100": 0.803, "H800": 0.803, "H200": 0.803,
    "GH200": 0.838, "B200": 0.776, "MI300X": 0.514, "MI325X": 0.604, "Gaudi2": 0.969, "Gaudi3": 0.741, "MetaX": 0.828,
    "Iluvatar-BI-V150": 1.0,  # the catalogue's value is itself measured
}  # fmt: skip
OTHER_MAMF = 0.75  # assumed for chips without a published measurement: the lower end of the above but MI3xx
ATTENTION = 0.6  # of the products' rate: flash kernels, forward and backward together
MEMORY_BANDWIDTH, LINK_BANDWIDTH = 0.85, 0.8
HALF = 300  # half-saturation of m and of min(n, k); the same fit gave 350 and 360
LAYER_SECONDS, ACTION_SECONDS, MESSAGE_SECONDS, STEP_SECONDS = 100e-6, 50e-6, 10e-6, 5e-3
CORE_FLOPS, CORE_BYTES = 5e10, 6e9  # one CPU core (emulated chips, speed 1.0): assumed; calibrate measures it
OVERHEAD_BYTES = 1 << 29  # context and libraries of an accelerator: assumed
CORE_OVERHEAD_BYTES = 64 << 20  # the same on a CPU, on top of the process before the model is built
LATENCY = {"intra": 10e-6, "inter": 20e-6}  # where the cluster file gives none (Calculon's values)
COLLECTIVES = ("all_to_all", "exchange")
ROWS = {
    "gemm": 4, "attention": 5, "layers": 6, "embed": 6, "head": 6, "split_layers": 6, "split_head": 6, "optimizer": 2,
    "visits": 5, "waiting": 6, "experts": 12,
}  # fmt: skip
NUMBERS = (
    "gemm_flops", "gemm_half", "attention_flops", "bytes_per_second", "layer_seconds", "action_seconds",
    "message_seconds", "step_seconds", "overhead_bytes", "score_seconds", "layer_backward_seconds", "pack_beta",
    "add_beta", "unpack_beta", "exchange_seconds", "accumulate_beta", "jitter", "split_seconds",
)  # fmt: skip
FAMILIES = ("layers", "split", "waiting", "attention", "visits", "optimizer", "exchange")  # with a spread of their own

NAMED = (6, 12)  # widths of rows that begin with a model's fingerprint
Row = tuple[float, ...]


@dataclass(frozen=True)
class LayerRow:
    """Measured seconds of one layer (or embedding, or head) on one rank that has 1/tp of it; or of what a TP group's
    ranks wait for each other; or of the two parts of a backward, B_INPUT (``forward``) and W (``backward``)."""

    fingerprint: str
    tp: float
    micro_batch_size: float
    seq_length: int
    forward: float
    backward: float


@dataclass(frozen=True)
class ChipRates:
    """Rates of one chip and dtype; see the module docstring for units. ``calibrated``: anything was measured."""

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
    attention: tuple[Row, ...] = ()
    layers: tuple[LayerRow, ...] = ()
    embed: tuple[LayerRow, ...] = ()
    head: tuple[LayerRow, ...] = ()
    optimizer: tuple[Row, ...] = ()
    visits: tuple[Row, ...] = ()
    waiting: tuple[LayerRow, ...] = ()
    split_layers: tuple[LayerRow, ...] = ()
    split_head: tuple[LayerRow, ...] = ()
    experts: tuple[tuple[Any, ...], ...] = ()
    calibrated: bool = False
    score_seconds: float = 0.0
    layer_backward_seconds: float = 0.0
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


@dataclass(frozen=True)
class LinkRates:
    """One direction of a link: ``alpha`` seconds per message, ``beta`` seconds per byte, ``message_seconds`` on the
    host (None: the chips' own); (alpha, beta) of ``all_to_all`` and of a TP group's ``exchange``, what posting takes
    included, where these were measured. ``same_node``: the bandwidth is each chip's own; otherwise it is that of a
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
    """The rows of one of ``ROWS`` with all their seconds multiplied."""
    n = SECONDS[table]
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
    _links: dict[tuple[str, str, bool], LinkRates] = field(default_factory=dict, repr=False, compare=False)

    def link(self, a: int, b: int) -> LinkRates:
        """The link from rank ``a`` to rank ``b``; UserError where nothing is known about it."""
        first, second = self.cluster.ranks[a], self.cluster.ranks[b]
        return self.between(first.group, second.group, first.node == second.node)

    def between(self, group: str, other: str, same_node: bool = False) -> LinkRates:
        """The link between two chips of one node (of ``group``), or between two nodes of these groups."""
        key = (group, other, same_node)
        if key not in self._links:
            self._links[key] = self.measured.get(key) or self._data_sheet(*key)
        return self._links[key]

    def _data_sheet(self, group: str, other: str, same_node: bool) -> LinkRates:
        cluster = self.cluster
        a, b = (next(g for g in cluster.nodes if g.name == name) for name in (group, other))
        chip = cluster.chips[a.chip]
        if same_node:
            known = Link(chip.link_bandwidth) if chip.link_bandwidth is not None else None
            link = cluster.intra_node or known
        else:
            link = cluster.link_between(group, other)
        if link is None:
            where = f"inside a node of {group}" if same_node else f"between nodes of {group} and {other}"
            key = "links.intra_node" if same_node else "links.inter_node"
            raise UserError(
                f"nothing is known about the link {where}", field=key, where=cluster.file,
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
        together, single = (
            cluster.seconds_per_byte(link, a, b, shared, rate, share) for shared in (not same_node, False)
        )
        return LinkRates(alpha, together, same_node=same_node, alone=single - together)


def load_rates(cluster: Cluster, dtype: str, recipe: str | None = None) -> Rates:
    """The rates of every chip of ``cluster`` that computes in ``dtype``; ``recipe``: and in fp8, if so.

    Raises:
        UserError: a malformed row, or a chip about which neither rates nor a data sheet say enough.
    """
    section = cluster.rates.get("chips", {}) if cluster.rates else {}
    unknown = [name for name in section if name not in cluster.chips]
    if unknown:
        raise UserError(
            "no node has this chip", field="rates.chips", value=unknown[0], where=cluster.file,
            accepted=", ".join(cluster.chips),
        )  # fmt: skip
    refuse_twice(cluster, section)
    chips, fp8 = {}, {}
    for name, chip in cluster.chips.items():
        given = {**section.get(name, {}), **chip.rates}
        if dtype in chip.dtypes:
            chips[name] = chip_rates(chip, dtype, given.get(dtype, {}), cluster)
        if name in chips and recipe is not None and "fp8" in chip.dtypes:
            fp8[name] = _fp8_rates(chips[name], chip, recipe, given.get(f"fp8_{recipe}", {}), cluster)
    return Rates(cluster, dtype, chips, _measured_links(cluster), fp8)


def _fp8_rates(plain: ChipRates, chip: Chip, recipe: str, given: Any, cluster: Cluster) -> ChipRates:
    """``plain``: the chip's rates in the dtype of the run, which it moves bytes with."""
    values = given_rates(chip.name, f"fp8_{recipe}", given, cluster)
    known = {"bytes_per_second": plain.bytes_per_second, **values}
    return replace(_cold_start(chip, "fp8", known, cluster), **known, calibrated=bool(given))


def refuse_twice(cluster: Cluster, section: Mapping[str, Any]) -> None:
    """``section``: rates by chip and dtype as ``calibrate`` writes them, under ``rates.chips`` of the cluster's file.

    Raises:
        UserError: rates of a chip that its own entry also gives, which one of the two would hide; or no mapping.
    """
    for name, chip in cluster.chips.items():
        own = _mapping(chip.rates, f"chips.{name}.rates", cluster)
        both = [dtype for dtype in _mapping(section.get(name, {}), f"rates.chips.{name}", cluster) if dtype in own]
        if both:
            raise UserError(
                f"rates.chips.{name}.{both[0]}, where calibrate writes, would be a second set of the same rates",
                field=f"chips.{name}.rates.{both[0]}", where=cluster.file, accepted="one of the two",
            )  # fmt: skip


def chip_rates(chip: Chip, dtype: str, given: Any, cluster: Cluster) -> ChipRates:
    """Rates of one chip: what ``given`` says, else the data sheet's."""
    values = given_rates(chip.name, dtype, given, cluster)
    if "layer_seconds" in values:
        values.setdefault("layer_backward_seconds", 2 * values["layer_seconds"])
    return replace(_cold_start(chip, dtype, values, cluster), **values, calibrated=bool(given))


def given_rates(chip: str, dtype: str, given: Any, cluster: Cluster) -> dict[str, Any]:
    """The fields of :class:`ChipRates` that an entry of ``rates.chips`` holds, checked; all tables, empty or not."""
    where = f"rates.chips.{chip}.{dtype}"
    entries = _mapping(given, where, cluster)
    for key in entries:
        if key not in (*ROWS, *NUMBERS, "spread"):
            accepted = ", ".join((*NUMBERS, *ROWS, "spread"))
            raise UserError("unknown rate", field=where, value=key, accepted=accepted, where=cluster.file)
    values: dict[str, Any] = {
        k: _number(entries[k], f"{where}.{k}", cluster, k not in ("gemm_flops", "bytes_per_second", "attention_flops"))
        for k in NUMBERS
        if k in entries
    }
    if "spread" in entries:
        values["spread"] = _spreads(entries["spread"], f"{where}.spread", cluster)
    for key, width in ROWS.items():
        rows = _rows(entries.get(key, []), width, f"{where}.{key}", cluster)
        values[key] = tuple(LayerRow(*r) for r in rows) if width == 6 else rows
    return values


def _spreads(value: Any, where: str, cluster: Cluster) -> dict[str, float]:
    """By family; files once had one number, that of an action."""
    by_family = value if isinstance(value, Mapping) else {"layers": value}
    if unknown := [family for family in by_family if family not in FAMILIES]:
        accepted = ", ".join(FAMILIES)
        raise UserError("unknown family of rates", field=where, value=unknown[0], accepted=accepted, where=cluster.file)
    return {family: _number(x, f"{where}.{family}", cluster) for family, x in by_family.items()}


def _cold_start(chip: Chip, dtype: str, given: Mapping[str, Any], cluster: Cluster) -> ChipRates:
    """Data sheet x default efficiencies; what ``given`` holds need not be on the data sheet."""
    if chip.speed is not None:
        speed = chip.speed
        core = CORE_FLOPS * speed * (0.5 if dtype == "fp64" else 1.0)
        return ChipRates(
            chip.name, dtype, core, 0.5 * core, CORE_BYTES * speed, overhead_bytes=CORE_OVERHEAD_BYTES,
            action_seconds=ACTION_SECONDS, message_seconds=MESSAGE_SECONDS, step_seconds=STEP_SECONDS,
        )  # fmt: skip
    peak = chip.flops.get(dtype)
    rate = given.get("gemm_flops") or (peak * share_of_peak(chip.name) if peak else None)
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
    return ChipRates(
        chip.name, dtype, rate, rate * ATTENTION, memory, 0.0 if "gemm_flops" in given else HALF, LAYER_SECONDS,
        ACTION_SECONDS, MESSAGE_SECONDS, STEP_SECONDS, OVERHEAD_BYTES, layer_backward_seconds=2 * LAYER_SECONDS,
    )  # fmt: skip


def source_of(chip: Chip) -> str:
    """Where the values are from that a cold start takes."""
    return chip.source if chip.speed is None else "emulated: a usual core is assumed"


def share_of_peak(chip: str) -> float:
    """Measured share of peak that large products reach, by the chip's name; :data:`OTHER_MAMF` if unpublished."""
    names = [name for name in MAMF if chip.startswith(name)]
    return MAMF[max(names, key=len)] if names else OTHER_MAMF


def _measured_links(cluster: Cluster) -> dict[tuple[str, str, bool], LinkRates]:
    groups = [g.name for g in cluster.nodes]
    both: dict[tuple[str, str, bool], LinkRates] = {}
    one_way: dict[tuple[str, str, bool], LinkRates] = {}
    items = cluster.rates.get("links", []) if cluster.rates else []
    for i, item in enumerate(items if isinstance(items, list) else [items]):
        where = f"rates.links[{i}]"
        entry = dict(_mapping(item, where, cluster))
        same = "within" in entry
        if same:
            ends: Sequence[Any] = [entry["within"]] * 2
        elif "between" in entry:
            ends = entry["between"]
        else:
            ends = [entry.get("from"), entry.get("to")]
        if not isinstance(ends, list) or len(ends) != 2 or any(e not in groups for e in ends):
            raise UserError(
                "a link is within a node group, between two, or from one to another", field=where, value=ends,
                accepted="node groups " + ", ".join(groups), where=cluster.file,
            )  # fmt: skip
        rates = _link_rates(entry, same, where, cluster)
        a, b = str(ends[0]), str(ends[1])
        target = one_way if "from" in entry else both
        target[a, b, same] = rates
        if "from" not in entry:
            target[b, a, same] = rates
    return both | one_way


def _link_rates(entry: Mapping[str, Any], same: bool, where: str, cluster: Cluster) -> LinkRates:
    known = ("within", "between", "from", "to", "alpha", "beta", "message_seconds", "collectives", "spread", "source")
    for key in entry:
        if key not in known:
            raise UserError("unknown key", field=where, value=key, accepted=", ".join(known), where=cluster.file)
    if "beta" not in entry:
        raise UserError("a link without its rate", field=where, accepted="beta: seconds per byte", where=cluster.file)
    alpha = _number(entry.get("alpha", 0.0), f"{where}.alpha", cluster)
    beta = _number(entry["beta"], f"{where}.beta", cluster)
    message = entry.get("message_seconds")
    pairs = {}
    for name, row in _mapping(entry.get("collectives", {}), f"{where}.collectives", cluster).items():
        at = f"{where}.collectives"
        if name not in COLLECTIVES:
            raise UserError("unknown key", field=at, value=name, accepted=", ".join(COLLECTIVES), where=cluster.file)
        row = _mapping(row, f"{at}.{name}", cluster)
        alpha_, beta_ = (_number(row.get(k, 0.0), f"{at}.{name}.{k}", cluster) for k in ("alpha", "beta"))
        pairs[name] = alpha_, beta_
    return LinkRates(
        alpha, beta, None if message is None else _number(message, f"{where}.message_seconds", cluster),
        pairs.get("all_to_all"), same, True, pairs.get("exchange"),
        spread=_number(entry["spread"], f"{where}.spread", cluster) if "spread" in entry else None,
    )  # fmt: skip


def _mapping(value: Any, where: str, cluster: Cluster) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError("a mapping was expected", field=where, value=value, where=cluster.file)
    return value


def _number(value: Any, where: str, cluster: Cluster, zero: bool = True) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    if not good or (value == 0 and not zero):
        accepted = "a number, 0 or more" if zero else "a number above 0"
        raise UserError("not a rate", field=where, value=value, accepted=accepted, where=cluster.file)
    return float(value)


def _rows(value: Any, width: int, where: str, cluster: Cluster) -> tuple[tuple[Any, ...], ...]:
    if not isinstance(value, list) or any(not isinstance(r, list) or len(r) != width for r in value):
        raise UserError("rows were expected", field=where, accepted=f"lists of {width} values", where=cluster.file)
    rows = []
    for row in value:
        first = 1 if width in NAMED else 0
        numbers = [_number(x, where, cluster, zero=False) for x in row[first:]]
        rows.append((*map(str, row[:first]), *numbers))
    return tuple(rows)
