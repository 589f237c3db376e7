"""Seconds and bytes of a stage that is described without ranks; used to rank templates.

:mod:`hetero_megatron.predictor.simulate.step` times concrete plans with the same operators, rates and memory formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hetero_megatron.cluster import Cluster, NodeGroup
from hetero_megatron.errors import UserError
from hetero_megatron.plans.canonical import Stage
from hetero_megatron.plans.fp8_checks import cut_fits, stage_fp8
from hetero_megatron.plans.memory.micro_batches import logits_limit
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES, MemoryBytes, host_bytes
from hetero_megatron.plans.memory.uniform_stages import UniformStageMemory
from hetero_megatron.predictor.cost.cost_options import CostOptions, StageChoice
from hetero_megatron.predictor.cost.expert_cost import token_bytes
from hetero_megatron.predictor.cost.link_model import LinkModel, LinkPrice, host_copy_waits
from hetero_megatron.predictor.cost.modelled_operators import UPDATE_BYTES
from hetero_megatron.predictor.cost.operator_cost import Operators
from hetero_megatron.predictor.cost.product_cost import Fp8Products
from hetero_megatron.predictor.cost.rates import ChipRates, LinkRates, Rates, load_rates
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.expert_load import ExpertLoad
from hetero_megatron.spec.flops import exchanges_of_head, tp_collectives
from hetero_megatron.utils.cached_method import cached_method

HOST_SHARE = 0.8  # of the bandwidth of a chip's link to its host, that large copies reach


@dataclass(frozen=True)
class UnitSeconds:
    """(forward, backward) seconds of one layer, of the embedding and of the head, including TP collectives; ``action``:
    seconds once per forward or backward; ``weight_action``: the same per W; ``layer_split``, ``head_split``: (W's
    seconds, seconds that B_INPUT and W together take more than a whole backward); ``experts``: what routed experts take
    of ``layer``, without links; ``again``: what forward of a layer that is recomputed whole takes beyond
    ``layer``."""

    layer: tuple[float, float]
    embed: tuple[float, float]
    head: tuple[float, float]
    action: float = 0.0
    layer_split: tuple[float, float] = (0.0, 0.0)
    head_split: tuple[float, float] = (0.0, 0.0)
    weight_action: float = 0.0
    experts: tuple[float, float] = (0.0, 0.0)
    again: float = 0.0

    def total(self, layers: int, full: int, embed: bool, head: bool) -> tuple[float, float]:
        """(forward, backward) seconds of a stage; ``full``: number of layers recomputed in backward."""
        forward, backward = (
            layers * self.layer[i] + embed * self.embed[i] + head * self.head[i] + self.action for i in (0, 1)
        )
        return forward, backward + full * (self.layer[0] + self.again)

    def split(self, layers: int, head: bool) -> tuple[float, float]:
        """The same as ``layer_split`` of a stage."""
        action = self.weight_action if layers or head else 0.0
        weight, extra = (layers * self.layer_split[i] + head * self.head_split[i] + action for i in (0, 1))
        return weight, extra

    @property
    def only_weights(self) -> UnitSeconds:
        """The same for a W alone, as if it were the backward."""
        return UnitSeconds((0.0, self.layer_split[0]), (0.0, 0.0), (0.0, self.head_split[0]), self.weight_action)


class CostModel:
    """Costs of stages of one model on one cluster at one sequence length.

    Args:
        rates: None: those of the cluster file and the data sheets.

    Raises:
        UserError: chips without rates and without a usable data sheet, malformed rates, an unknown dtype.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: Cluster,
        seq_length: int,
        dtype: str = "bf16",
        options: CostOptions | None = None,
        rates: Rates | None = None,
    ) -> None:
        if dtype not in ITEM_BYTES:
            raise UserError("unknown dtype", field="dtype", value=dtype, accepted=", ".join(ITEM_BYTES))
        self.model, self.cluster, self.seq_length, self.dtype = model, cluster, seq_length, dtype
        self.options = options = options or CostOptions()
        self.item, self.wide = ITEM_BYTES[dtype], max(ITEM_BYTES[dtype], 4)
        self.rates: Rates = rates or load_rates(cluster, dtype, options.fp8.recipe if options.fp8 is not None else None)
        self.links = LinkModel(self.rates)
        self.memory = UniformStageMemory(model, self.item, options.moments, options.logits_bytes, options.muon)
        self._home = {
            c: max((g for g in cluster.nodes if g.chip == c), key=lambda g: g.chips_per_node) for c in cluster.chips
        }

    def chip_rates(self, chip: str) -> ChipRates:
        """Raises UserError for a chip that does not support the dtype or that the cluster lacks."""
        if chip not in self.rates.chips:
            dtypes = ", ".join(self.cluster.chips[chip].dtypes) if chip in self.cluster.chips else ""
            raise UserError(
                f"the chip does not compute in {self.dtype}" if dtypes else "the cluster has no such chip",
                field="chip", value=chip, accepted=f"one of {dtypes}" if dtypes else ", ".join(self.cluster.chips),
                where=self.cluster.file,
            )  # fmt: skip
        return self.rates.chips[chip]

    @cached_method
    def operators(self, chip: str, fp8: bool = False, model: ModelSpec | None = None) -> Operators:
        """``fp8``: with linear modules in fp8, on a chip that has it; ``model``: of the layers in question, None: of
        all. Where kinds of layers were not measured apart, but all together were, each is like the average."""
        products, recipe = None, self.options.fp8
        if fp8:
            assert recipe is not None and chip in self.rates.fp8, f"{chip} has no fp8"
            products = Fp8Products(self.rates.fp8[chip], recipe.recipe, self.item)
        options, rates = self.options, self.chip_rates(chip)
        sizes = options.softmax_batches, products, options.logits_bytes, options.loss_words
        operators = Operators(model or self.model, rates, self.item, options.sequence_parallel, *sizes)
        whole = operators if model in (None, self.model) else self.operators(chip, fp8)
        return whole if whole.layers_measured and not operators.layers_measured else operators

    def computes_in_fp8(self, stage: Stage) -> bool:
        """Whether a stage of a plan has its linear modules in fp8."""
        return (fp8 := self.options.fp8) is not None and stage.num_layers > 0 and stage_fp8(stage, fp8) is not None

    def head_in_chunks(self, stage: Stage) -> bool:
        """Whether head and loss of a stage of a plan go through chunks of tokens."""
        return logits_limit(stage, self.model, self.item, self.options.logits_bytes) is not None

    def in_fp8(self, stage: StageChoice, micro_batch_size: int) -> bool:
        """Whether the planner has the stage's linear modules in fp8: where the run, its chips and its cut allow it, and
        neither forward nor backward of a layer is slower for it."""
        return stage.layers > 0 and self._uses_fp8(stage.chip, stage.tp, -(-micro_batch_size // stage.dp))

    @cached_method
    def _uses_fp8(self, chip: str, tp: int, rows: int) -> bool:
        fp8 = self.options.fp8
        is_possible = fp8 is not None and chip in self.rates.fp8 and cut_fits(self.model, tp, fp8)
        return is_possible and self.fp8_pays(chip, 1 / tp, rows, self.seq_length)

    def fp8_pays(self, chip: str, share: float, rows: float, length: int) -> bool:
        """Whether a layer is faster in fp8 and neither its forward nor its backward is slower."""
        quantised, unquantised = (self.operators(chip, fp8).layer(share, rows, length) for fp8 in (True, False))
        return quantised != unquantised and all(a <= b for a, b in zip(quantised, unquantised, strict=True))

    def forward_seconds(self, stage: StageChoice, micro_batch_size: int) -> float:
        """The whole stage including TP collectives, without boundary transfers."""
        return self._stage(stage, micro_batch_size)[0]

    def backward_seconds(self, stage: StageChoice, micro_batch_size: int) -> float:
        """The same for backward, including recomputation."""
        return self._stage(stage, micro_batch_size)[1]

    @cached_method
    def _stage(self, stage: StageChoice, micro_batch_size: int) -> tuple[float, float]:
        forward, backward = self.parts(stage, micro_batch_size).total(
            stage.layers, stage.full, stage.embed, stage.head
        )
        if not stage.away:
            return forward, backward
        forward_wait, backward_wait = self.copy_waits(stage, micro_batch_size)
        return forward + forward_wait, backward + backward_wait

    def copy_waits(self, stage: StageChoice, micro_batch_size: int) -> tuple[float, float]:
        """Seconds for which (forward, backward) wait for copies of activations to host memory, and back."""
        rate, seconds = self.host_rate(stage.chip), self.parts(stage, micro_batch_size)
        sizes = self.host_layers(stage, micro_batch_size)
        backward = [seconds.layer[1] + (seconds.layer[0] if i < stage.full else 0.0) for i in range(stage.layers)]
        head = seconds.head[1] if stage.head else 0.0
        return host_copy_waits([size / rate for size in sizes], seconds.layer[0], backward, 1, head)

    def host_layers(self, stage: StageChoice, micro_batch_size: int) -> tuple[float, ...]:
        """By layer, bytes of one micro-batch in host memory on a rank of the stage."""
        return self.memory.host_layers(*self._work(stage, micro_batch_size))

    def parts(self, stage: StageChoice, micro_batch_size: int) -> UnitSeconds:
        """Seconds of one layer, of embedding and head on a rank of the stage."""
        rows, fp8 = -(-micro_batch_size // stage.dp), self.in_fp8(stage, micro_batch_size)
        return self._unit(stage.chip, self.home(stage).name, stage.tp, rows, stage.recompute, fp8)

    @cached_method
    def _unit(self, chip: str, home: str, tp: int, rows: int, recompute: str, fp8: bool) -> UnitSeconds:
        """Of a rank of an equal TP group on nodes of the group ``home``."""
        link = self.tp_link(self.cluster.groups[home], tp) if tp > 1 else None
        collective = self.tp_exchange_seconds(tp, rows, link)
        host_seconds = (tp - 1) * (link.message_seconds or 0.0) if link is not None else 0.0
        routed = self._routed_seconds(tp, rows, link, host_seconds)
        operators = self.operators(chip, fp8)
        return self.unit_seconds(operators, 1 / tp, rows, collective, recompute, host_seconds, routed=routed)

    def unit_seconds(
        self, operators: Operators, share: float, rows: int, collective: float, recompute: str = "none",
        host_seconds: float = 0.0, load: ExpertLoad | None = None, routed: tuple[float, float] = (0.0, 0.0),
        chunked: bool | None = None,
    ) -> UnitSeconds:  # fmt: skip
        """Times of one rank of a TP group.

        Args:
            share: its part of heads and columns; rows: sequences of the micro-batch that the group computes.
            collective: seconds of one gather or scatter of the group's activations; host_seconds: of it, on the host.
            load: of routed experts, None: of a plain TP group; routed: (forward, backward) seconds of exchanging
                tokens in a layer that is a mixture of experts.
        """
        length = self.seq_length
        forward, backward = operators.exchange(share, rows, length, collective)
        usual = load or operators.plain(share, rows * length)
        count, moe = tp_collectives(self.model, usual), usual.layers if usual is not None else 0.0
        exchanged = count * forward + moe * routed[0], count * backward + moe * routed[1]
        layer = operators.layer(share, rows, length, exchanged, count * host_seconds, load)
        experts = operators.experts(usual) if usual is not None and rows else (0.0, 0.0)
        embed, head = operators.embed(share, rows, length), operators.head(share, rows, length, chunked)
        (layer_input, layer_weight), (head_input, head_weight) = (
            operators.split_layer(share, rows, length, load), operators.split_head(share, rows, length, chunked)
        )
        whole_backward = operators.layer(share, rows, length, load=load)[1]
        recompute_seconds = operators.core_again(share, rows, length) if recompute == "selective" else 0.0
        if recompute == "elementwise":  # with the gathers of what attention and MLP read
            recompute_seconds = operators.elementwise(share, rows, length, load) + count / 2 * forward
        with_head = exchanges_of_head(self.model)
        return UnitSeconds(
            layer=(layer[0], layer[1] + recompute_seconds),
            embed=(embed[0] + forward, embed[1] + backward),
            head=(
                head[0] + with_head * forward,
                head[1] + with_head * backward + operators.modules_again(share, rows, length, recompute),
            ),
            action=operators.rates.action_seconds if rows else 0.0,
            layer_split=(layer_weight, layer_input + layer_weight - whole_backward),
            head_split=(head_weight, head_input + head_weight - head[1]),
            weight_action=operators.rates.split_seconds if rows else 0.0,
            experts=(moe * experts[0], moe * experts[1]),
        )

    def _routed_seconds(self, tp: int, rows: int, link: LinkRates | None, host_seconds: float) -> tuple[float, float]:
        """(forward, backward) seconds of exchanging a mixture of experts' tokens in a plain TP group: all of them go
        everywhere. Counts go first."""
        if self.model.moe is None or tp == 1 or link is None:
            return 0.0, 0.0
        exchanges = [self.tp_exchange_seconds(tp, rows, link, width) for width in token_bytes(self.model, self.item)]
        counts = link.collective("exchange")[0] + host_seconds
        return counts + exchanges[0] + exchanges[1], exchanges[2] + exchanges[3]

    def tp_exchange_seconds(self, tp: int, rows: int, link: LinkRates | None, width: int | None = None) -> float:
        """Seconds of one gather or scatter-sum of [rows, seq, hidden] (or of ``width`` bytes per token) inside a TP
        group; every rank sends (tp - 1)/tp of it."""
        if tp == 1 or link is None:
            return 0.0
        width = self.model.hidden_size * self.item if width is None else width
        size = rows * self.seq_length * width * (tp - 1) / tp
        alpha, beta = link.collective("exchange")
        messages = tp - 1 - (link.exchange is not None)  # a measured exchange includes starting one message
        # Over a node's shared network cards all ranks of the group send at once.
        return alpha + size * beta + messages * (link.message_seconds or 0.0)

    def home(self, stage: StageChoice) -> NodeGroup:
        return self.cluster.groups[stage.home] if stage.home else self._home[stage.chip]

    def tp_link(self, home: NodeGroup, tp: int) -> LinkRates:
        """The slowest link inside a TP group of several ranks, which fill nodes of ``home`` one after the other, also
        where it has fewer: a template's group has nodes of several, and nodes are added on trial."""
        if tp <= home.chips_per_node:
            return self.rates.between(home.name, home.name, same_node=True)
        link = self.rates.between(home.name, home.name)
        local = home.chips_per_node  # ranks of the group that share a node's network cards
        out = local * (tp - local) / (tp - 1)  # volume that leaves the node, in units of one rank's volume
        return LinkRates(link.alpha, link.beta * out, link.message_seconds, None, False, link.calibrated)

    def boundary_seconds(
        self, a: StageChoice, b: StageChoice, micro_batch_size: int, link: LinkPrice, sharing: int = 1,
        same_node: bool = False,
    ) -> float:  # fmt: skip
        """Seconds of one transfer between stages, one direction. Each token crosses once; the receivers' gather is part
        of their layers, as in the runtime.

        Args:
            link: between nodes of the stages, or with ``same_node`` inside one.
            sharing: concurrent transfers over a node's network cards.
        """
        size = micro_batch_size * self.seq_length * self.model.hidden_size * self.item
        widths = [s.tp * s.dp if same_node else math.ceil(s.tp * s.dp / self.home(s).chips_per_node) for s in (a, b)]
        rank_bytes = size / max(s.tp * s.dp for s in (a, b))
        # Transfers share the cards' bandwidth (that of their fastest link); none is faster than its own link.
        per_byte = max(link.link, max(link.out, link.into) * sharing)
        return link.alpha + max(size * per_byte / min(widths), rank_bytes * link.pair)

    def owned_elements(self, stage: StageChoice, replicas: float) -> float:
        """Elements whose optimizer states one rank keeps when ``replicas`` pipelines hold the same layers."""
        return self.memory.trained(*stage.cut) / (stage.dp * replicas)

    def optimizer_seconds(self, stage: StageChoice, replicas: float) -> float:
        """Of a stage whose layers ``replicas`` pipelines hold; owners of matrices are chosen by speed."""
        owned = self.owned_elements(stage, replicas)
        flops = self.muon_flops(owned)
        if flops and replicas > 1:  # all owners take as long as one of the mean speed does
            flops *= self.products_per_second(stage.chip) / self._mean_products_per_second()
        return self.update_seconds(self.home(stage), owned, flops, stage.offload)

    def update_seconds(
        self, home: NodeGroup, owned: float, flops: float, offload: bool, resident: bool = False
    ) -> float:
        """Seconds of the optimizer of one rank that owns ``owned`` elements, of which Muon's products take ``flops``;
        ``offload``: in host memory, taken to be no faster than on the chip; ``resident``: all else is there, too."""
        seconds = self.operators(home.chip).optimizer(owned)
        if offload:  # gradients out, new weights in
            host = owned * UPDATE_BYTES * home.chips_per_node / self.options.host_memory_bandwidth
            seconds = max(seconds, host) + (not resident) * owned * (4 + self.item) / self.options.host_bandwidth
        if flops:
            seconds += flops / self.products_per_second(home.chip)
        return seconds + self.chip_rates(home.chip).step_seconds

    def muon_flops(self, owned: float) -> float:
        """Of updating so many elements of all kinds; 0 with other optimizers."""
        if not self.options.muon:
            return 0.0
        from hetero_megatron.plans.matrices import mean_flops

        return owned * mean_flops(self.model)

    @cached_method
    def _mean_products_per_second(self) -> float:
        ranks = self.cluster.ranks
        return sum(self.products_per_second(rank.chip) for rank in ranks) / len(ranks)

    @cached_method
    def products_per_second(self, chip: str) -> float:
        """FLOP/s of Muon's update: as measured, else of products of square matrices as wide as the model."""
        if measured := self.chip_rates(chip).newton_schulz:
            from hetero_megatron.plans.matrices import update_rate

            return update_rate(measured)
        h = self.model.hidden_size
        return 2 * h**3 / self.operators(chip).gemm(h, h, h)

    def host_rate(self, chip: str) -> float:
        """Bytes/s of one chip's copies to host memory, or from it: emulated links are exact, others reach a share."""
        chip_type = self.cluster.chips[chip]
        if chip_type.host_bandwidth is None:
            return self.options.host_bandwidth
        return chip_type.host_bandwidth * (1.0 if chip_type.speed is not None else HOST_SHARE)

    def first_backward_saved(self, chip: str, held: float) -> float:
        """Seconds by which a step's first backward is shorter: it writes ``held`` gradients, others add to them."""
        return held * self.item * self.chip_rates(chip).accumulate_beta

    def memory_bytes(self, stage: StageChoice, micro_batch_size: int, in_flight: int, replicas: float) -> MemoryBytes:
        """Memory of the stage's worst rank; ``in_flight``: micro-batches; ``replicas``: pipelines with these layers."""
        kept, working = self.activation_bytes(stage, micro_batch_size)
        trained, copies = self.memory.trained(*stage.cut), stage.dp * replicas
        buffers = int(self.memory.buffers(stage.tp, stage.embed, stage.head, copies, trained))
        communicators = self.cluster.chips[stage.chip].communicator.least
        other_bytes = self.overhead(stage.chip) - communicators, self.host_states(stage, replicas), communicators
        return MemoryBytes(*self.states(stage, replicas), in_flight * kept + working, buffers, *other_bytes)

    def states(self, stage: StageChoice, replicas: float) -> tuple[int, int, int]:
        """Bytes of (weights, gradients, optimizer) in device memory on the stage's worst rank."""
        weights, gradients, optimizer = self.memory.states(*stage.cut, self.owned_elements(stage, replicas))
        return weights, gradients, 0 if stage.offload else optimizer

    def host_states(self, stage: StageChoice, replicas: float) -> int:
        """Bytes of an offloaded optimizer of one rank in its host's memory."""
        return host_bytes(self.owned_elements(stage, replicas), self.options.moments) if stage.offload else 0

    def activation_bytes(self, stage: StageChoice, micro_batch_size: int) -> tuple[int, int]:
        """(bytes kept per micro-batch, working bytes of backward) on a rank of the stage."""
        return self.memory.activations(*self._work(stage, micro_batch_size))

    def working_bytes(self, stage: StageChoice, micro_batch_size: int) -> int:
        """Bytes that any backward of a micro-batch works with, whole or split."""
        return self.memory.most_beside(*self._work(stage, micro_batch_size))

    def _work(self, stage: StageChoice, micro_batch_size: int) -> tuple[Any, ...]:
        """What :class:`UniformStageMemory` asks for."""
        rows, fp8 = -(-micro_batch_size // stage.dp), self.options.fp8
        recipe = fp8.recipe if fp8 is not None and self.in_fp8(stage, micro_batch_size) else None
        return *stage.cut, stage.recompute, stage.first, rows, self.seq_length, recipe, stage.away

    def waiting_bytes(self, stage: StageChoice, micro_batch_size: int) -> int:
        """Bytes of a micro-batch on a rank of the stage from B_INPUT to W, where backward is split."""
        rows = -(-micro_batch_size // stage.dp)
        return self.memory.operands(stage.tp, stage.layers, stage.head, rows, self.seq_length)

    def overhead(self, chip: str) -> int:
        """Bytes of the framework and of communicators on a chip, before it is known how many there are."""
        return int(self.chip_rates(chip).overhead_bytes) + self.cluster.chips[chip].communicator.least

    def memory_limit(self, chip: str) -> int:
        """Most bytes that :meth:`memory_bytes` (with overhead) may reach: the chip's memory minus the margin."""
        if chip not in self.cluster.chips:
            raise UserError("the cluster has no such chip", field="chip", value=chip, where=self.cluster.file)
        chip_type = self.cluster.chips[chip]
        return int((chip_type.memory_budget or chip_type.memory) * (1 - self.options.margin))
