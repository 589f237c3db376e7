"""Memory of each rank of a plan, by the formulas of :mod:`.activations`, :mod:`.divided` and the others beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.cluster import Chip, Cluster, format_bytes
from hetero_megatron.plans.buckets import IN_FLIGHT, Bucket, make_buckets, plan_groups
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.memory.activations import (
    RankWork,
    activation_bytes,
    graph_bytes,
    host_kept_bytes,
    most_held,
)
from hetero_megatron.plans.memory.divided import (
    DividedBytes,
    bucket_buffers,
    copied_masters,
    frozen_bytes,
    host_rows,
    in_device,
)
from hetero_megatron.plans.memory.micro_batches import stage_work
from hetero_megatron.plans.program import held_by_stages, moments_by_stages
from hetero_megatron.plans.routing import EVEN, Routing
from hetero_megatron.plans.shares import has_context, rank_shares
from hetero_megatron.schedule.actions import HOST_LOOKAHEAD, LOOKAHEAD
from hetero_megatron.spec import LogicalTensor, ModelSpec, Share, stage_tensors, tensor_box
from hetero_megatron.spec.adapted_model import stored_bytes
from hetero_megatron.spec.flops import LOGITS_BYTES

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
ADAM_MOMENTS = 2
Ints = NDArray[np.int64]


def moments_of(optimizer: str) -> int:
    """What ``--optimizer`` keeps per element, beside the master: Muon of all but matrices, of which it keeps 1."""
    return 1 if optimizer == "sgd" else ADAM_MOMENTS


def cannot_offload(moments: int, dtype: str, muon: bool = False) -> tuple[str, str] | None:
    """(why an optimizer cannot be in host memory, flags of what can), None where it can."""
    if moments != ADAM_MOMENTS or muon:
        return "only Adam runs in host memory", "--optimizer adam"
    if dtype == "fp64":
        return "the update in host memory is fp32", "--bf16, --fp16 or fp32"
    return None


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one rank.

    Attributes:
        weights: parameters; gradients: accumulated, in at least fp32.
        optimizer: moments, and fp32 masters of 16-bit weights, of the elements that the rank owns.
        activations: kept for backward by all micro-batches in flight, what backward works with, and what is on its way
            between stages; where a stage divides weights, at the worst moment of a step.
        moving: of weights that the stage divides, gradients and messages under way then.
        buffers: gradients packed, received and summed when they travel.
        overhead: of the framework, before the first tensor; communicators: buffers of the communication library.
        graphs: memory of device graphs beside the activations, which then are there all step long, too.
        second_model: weights of one that only runs forward, and what of it waits for the loss.
        host: fp32 masters and moments of an offloaded optimizer, with rows and gradients of the weights that its stage
            divides, and offloaded activations: in the host's memory, so not part of ``total``.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    overhead: int = 0
    host: int = 0
    communicators: int = 0
    graphs: int = 0
    second_model: int = 0
    moving: int = 0

    @property
    def lasting(self) -> int:
        """What is there all step long."""
        states = self.weights + self.gradients + self.optimizer + self.second_model
        return self.overhead + self.communicators + states + self.graphs

    @property
    def total(self) -> int:
        if self.graphs:
            return self.lasting + self.activations + self.buffers
        # Buckets travel when most activations of the last micro-batch are gone.
        return self.lasting + max(self.activations + self.moving, self.buffers)

    def parts(self) -> dict[str, int]:
        """What ``total`` is made of."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}

    @property
    def largest(self) -> str:
        """The part that is most of it."""
        bytes_of_part = self.parts()
        return max(bytes_of_part, key=bytes_of_part.__getitem__)


def saved_in_few_bits(tensors: Iterable[LogicalTensor], share: Share, item: int) -> int:
    """Bytes that those of a rank's tensors that are stored in few bits take less than ``item`` per element."""
    boxes = ((t, tensor_box(t, share)) for t in tensors if t.int8 or t.nf4)
    return sum(box.size * item - stored_bytes(tensor, box) for tensor, box in boxes)


def host_bytes(owned: float, moments: int = 2) -> int:
    """Of an offloaded optimizer: masters are copies in fp32 whatever the dtype of the weights, and so are moments."""
    return round(4 * owned * (moments + 1))


def state_bytes(
    held: int, owned: float, item: int, moments: int = 2, trained: int | None = None, saved: int = 0
) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) of a rank that holds and owns so many elements; ``trained``: of those held, None:
    all; ``saved``: bytes, by weights in few bits."""
    wide = max(item, 4)
    master = 4 if item == 2 else 0
    return held * item - saved, (held if trained is None else trained) * wide, round(owned * (moments * wide + master))


def estimate_memory(
    plan: Plan, spec: ModelSpec, dtype: str, moments: int = 2, buckets: tuple[Bucket, ...] | None = None,
    logits_bytes: int = LOGITS_BYTES, routing: Routing = EVEN, fp8: Fp8 | None = None, graphs: bool = False,
    muon: bool = False,
) -> dict[int, MemoryBytes]:  # fmt: skip
    """Memory of every rank in bytes, without the framework's overhead and communicators.

    Args:
        moments: optimizer moments per element: 2 for Adam, 1 for SGD with momentum; of Muon's matrices, which buckets
            know, it is 1 in any case.
        buckets: those of the plan, if already made.
        logits_bytes: size of a micro-batch's logits on a rank above which head and loss run in chunks of tokens.
        routing: how tokens divide over experts, which what they keep depends on.
        fp8: what linear modules compute in, where their stage does not say otherwise.
        graphs: layers run as device graphs.
        muon: the optimizer is Muon, where ``buckets`` are still to be made.
    """
    item = ITEM_BYTES[dtype]
    out = plan_activations(plan, spec, item, logits_bytes, routing, fp8, graphs)
    index = {rank: i for i, rank in enumerate(plan.ranks)}
    held_elements, owned, copied, owned_divided, buffers = (np.zeros(len(index), np.int64) for _ in range(5))
    # Bytes of each rank's latest buckets, in the order of sending: [under way | being summed, IN_FLIGHT, ranks].
    recent = np.zeros((2, IN_FLIGHT, len(index)), np.int64)
    places: dict[tuple[int, ...], Ints] = {}
    counts_of_layout: dict[object, tuple[Ints, Ints, Ints, Ints]] = {}
    buckets = buckets if buckets is not None else make_buckets(plan, spec, muon=muon)
    onward = {bucket.onward for bucket in buckets}
    divided, elsewhere, rows, matrices = dict[int, DividedBytes](), dict[int, int](), dict[int, int](), None
    if plan.sharding_stages:
        from hetero_megatron.plans.frozen_buckets import frozen_buckets
        from hetero_megatron.plans.memory.divided_steps import divided_bytes

        work: dict[int, tuple[RankWork, ...]] = {}
        for stage in (stage for stage in plan.stages if stage.weights is not None):
            work |= stage_work(stage, spec, item, logits_bytes, routing, fp8, plan.islands)
        base = frozen_buckets(plan, spec)
        activations = {rank: out[rank].activations for rank in work}
        divided = divided_bytes(plan, spec, (*buckets, *base), item, work, activations)
        elsewhere = frozen_bytes(base, item, plan.offloading)
        rows = host_rows((*buckets, *base), item) if plan.offloading else {}
    if any(bucket.matrices for bucket in buckets):
        from hetero_megatron.plans.memory.matrices import MatrixBytes

        matrices = MatrixBytes(len(index), item)
    for bucket in buckets:
        key = bucket.layout_key
        if key not in counts_of_layout:
            counts_of_layout[key] = _counts(bucket, item)
        if bucket.ranks not in places:
            places[bucket.ranks] = np.array([index[r] for r in bucket.ranks], np.int64)
        rank_indices, (bucket_held, bucket_owned, moving, apart) = places[bucket.ranks], counts_of_layout[key]
        if bucket.weights is not None:
            owned_divided[rank_indices] += bucket_owned * (bucket.onward is None)
            continue
        if bucket.index in onward and plan.offloading:
            bucket_held = bucket_held * in_device(bucket, plan)
        held_elements[rank_indices] += bucket_held
        owned[rank_indices] += bucket_owned
        copied[rank_indices] += apart
        if bucket.matrices and matrices is not None:
            moving = matrices.add(bucket, rank_indices, bucket_held, bucket_owned)
        last = np.concatenate([recent[:, 1:, rank_indices], moving[:, None]], axis=1)
        recent[:, :, rank_indices] = last
        most = np.maximum(last[:, 0].max(axis=0) + last[0, 1:].sum(axis=0), moving.max(axis=0))
        buffers[rank_indices] = np.maximum(buffers[rank_indices], most)
    frozen = _frozen(plan, spec, item) if spec.lora is not None else {}
    columns = (column.tolist() for column in (held_elements, owned, copied, owned_divided, buffers))
    for rank, holds, owns, copies, owns_divided, most_buffers in zip(plan.ranks, *columns, strict=True):
        frozen_elements, saved = frozen.get(rank, (0, 0))
        weights, gradients, optimizer = state_bytes(holds + frozen_elements, owns, item, moments, holds, saved)
        rank_divided = divided.get(rank, DividedBytes())
        weights += rank_divided.weights - elsewhere.get(rank, 0)
        gradients += owns_divided * max(item, 4) if rank not in plan.offloading else 0
        optimizer += (owns_divided * (moments + 1) + copies) * max(item, 4)  # masters are copies in any dtype
        if matrices is not None:
            i = index[rank]
            optimizer += int(matrices.more[i]) - int(matrices.owned[i]) * (moments - 1) * max(item, 4)
            gradients, most_buffers = gradients + int(matrices.sums[i]), max(most_buffers, int(matrices.update[i]))
        host = out[rank].host
        if rank in plan.offloading:
            optimizer, host = 0, host + host_bytes(owns + owns_divided, moments) + rows.get(rank, 0)
        more = rank_divided.moving  # or less, where the worst moment is one with fewer activations
        kept = max(out[rank].activations + min(more, 0), 0)
        states = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "host": host}
        out[rank] = replace(out[rank], buffers=most_buffers, activations=kept, moving=max(more, 0), **states)
    return out if plan.outer is None else _with_outer_steps(out, plan, spec, buckets, max(item, 4))


def _counts(bucket: Bucket, item: int) -> tuple[Ints, Ints, Ints, Ints]:
    """By rank of a bucket, elements held and owned, [2, ranks] bytes under way and while they are summed, and elements
    owned whose masters are copies in any case (``memory/matrices.py`` counts those of Muon's matrices)."""
    (held, owned), several = bucket.counts(), len(bucket.ranks) > 1
    moving = bucket_buffers(bucket, held, owned, item) if several else np.zeros((2, 1), np.int64)
    are_copies = several and item > 2 and not bucket.matrices
    return held, owned, moving, copied_masters(bucket) if are_copies else np.zeros_like(held)


def _with_outer_steps(
    memory: Mapping[int, MemoryBytes], plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], item: int
) -> dict[int, MemoryBytes]:
    """With what outer steps need, which is where the optimizer's states are; an exchange that is under way for some
    steps is there beside activations."""
    from hetero_megatron.plans.outer import outer_memory

    assert plan.outer is not None
    with_outer = {}
    for rank, (lasting, passing) in outer_memory(plan, spec, buckets, item).items():
        needs = memory[rank]
        buffers, beside_activations = max(needs.buffers, passing), 0
        if plan.outer.delay:
            buffers, beside_activations = needs.buffers + passing, passing
        states = {"host": needs.host + lasting} if rank in plan.offloading else {"optimizer": needs.optimizer + lasting}
        with_outer[rank] = replace(needs, buffers=buffers, activations=needs.activations + beside_activations, **states)
    return with_outer


def _frozen(plan: Plan, spec: ModelSpec, item: int) -> dict[int, tuple[int, int]]:
    """(elements that each rank holds and that are not trained, bytes that those in few bits save)."""
    frozen: dict[int, tuple[int, int]] = {}
    for stage in plan.stages:
        tensors = stage_tensors(spec, stage.layer_indices(), stage.embed, stage.head)
        share_of_rank = rank_shares(spec, stage)
        sizes = {
            share: (
                sum(tensor_box(t, share).size for t in tensors if not t.trained),
                saved_in_few_bits(tensors, share, item),
            ) for share in {*share_of_rank.values()}
        }  # fmt: skip
        frozen |= {rank: sizes[share] for rank, share in share_of_rank.items()}
    return frozen


def plan_activations(
    plan: Plan, spec: ModelSpec, item: int, logits_bytes: int = LOGITS_BYTES, routing: Routing = EVEN,
    fp8: Fp8 | None = None, graphs: bool = False,
) -> dict[int, MemoryBytes]:  # fmt: skip
    """Only the activations of every rank, on the device and in host memory, and what ``graphs`` take beside them."""
    out: dict[int, MemoryBytes] = {}
    memory_of_work: dict[tuple[object, ...], MemoryBytes] = {}
    for pipeline in plan.pipelines:
        rows = held_by_stages(plan, pipeline)
        # Of a stage that splits backwards, what waits for W.
        split = moments_by_stages(plan, pipeline) if any(any(waiting) for row in rows for _, waiting in row) else ()
        for s, (stage, held_states) in enumerate(zip(pipeline.stages, rows, strict=True)):
            work = stage_work(stage, spec, item, logits_bytes, routing, fp8, plan.islands)
            moments = split[s] if split else ()
            for rank, chunks in work.items():
                if (chunks, held_states, moments) not in memory_of_work:
                    if moments:
                        from hetero_megatron.plans.memory.split_backward import split_activation_bytes

                        activations = split_activation_bytes(spec, chunks, moments)
                    else:
                        activations = activation_bytes(spec, chunks, held_states)
                    graph_memory = graph_bytes(spec, chunks, held_states) if graphs else 0
                    host = most_held([host_kept_bytes(spec, x) for x in chunks], [0] * len(chunks), held_states)
                    memory_of_work[chunks, held_states, moments] = MemoryBytes(
                        activations=activations, graphs=graph_memory, host=host
                    )
                out[rank] = memory_of_work[chunks, held_states, moments]
            if not has_context(stage, plan.seq_length):
                continue
            from hetero_megatron.plans.memory.context_members import context_activations

            with_context = context_activations(spec, stage, plan.seq_length, work, held_states, moments)
            out |= {rank: MemoryBytes(activations=size, host=host) for rank, (size, host) in with_context.items()}
    return out


def library(chip: Chip) -> str:
    """Whose communication library a chip has; "": none, as an emulated chip transfers by gloo, in host memory."""
    return "" if chip.speed is not None else chip.vendor or "unknown"


def communicators(
    plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], vendors: Mapping[int, str]
) -> dict[int, tuple[int, int]]:
    """By rank, (communicators of its device's library, peers in all of them).

    Tensor-parallel, context and expert groups and those of gradients have one each, and pipeline neighbours one for
    each direction. Groups of several vendors, or of ranks without one (the CPU), are gloo's, in host memory; so is the
    world's, which carries numbers.

    Args:
        vendors: whose library each rank's chip has; "": none.
    """
    counts = dict.fromkeys(plan.ranks, (0, 0))

    def count(ranks: Iterable[int]) -> None:
        members = tuple(ranks)
        if len(members) > 1 and vendors[members[0]] and len({vendors[r] for r in members}) == 1:
            for rank in members:
                groups, peers = counts[rank]
                counts[rank] = groups + 1, peers + len(members) - 1

    all_groups = plan_groups(plan, buckets, spec)
    all_groups.remove(plan.ranks)  # the world's own; where gradients travel in it, it is listed twice
    for group in all_groups:
        count(group)
    for pipeline in plan.pipelines:
        for sender, receiver in zip(pipeline.stages, pipeline.stages[1:]):
            for a in sender.ranks:
                for b in receiver.ranks:
                    count((a, b))
                    count((a, b))
    return counts


def with_communicators(
    memory: Mapping[int, MemoryBytes], plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], cluster: Cluster,
    dtype: str,
) -> dict[int, MemoryBytes]:  # fmt: skip
    """``memory`` of all ranks with that of their communicators, and of the receives that are posted further ahead where
    they come through host memory."""
    chips = {rank: cluster.chip_of(rank) for rank in plan.ranks}
    libraries = {rank: library(chip) for rank, chip in chips.items()}
    counts = communicators(plan, spec, buckets, libraries)
    ahead = _receives_through_host(plan, spec, libraries, ITEM_BYTES[dtype])
    return {
        rank: replace(
            needs, communicators=max(communicator.bytes(*counts[rank]), communicator.least),
            activations=needs.activations + ahead.get(rank, 0),
        )
        for rank, needs in memory.items()
        for communicator in [chips[rank].communicator]
    }  # fmt: skip


def _receives_through_host(
    plan: Plan, spec: ModelSpec, libraries: Mapping[int, str], item: int
) -> dict[int, int]:
    """By rank that has no library in common with any rank of the stages beside its own: bytes of the receives that it
    posts more than others."""
    if len({*libraries.values()}) == 1 and all(libraries.values()):
        return {}
    more = dict[int, int]()
    for stages in (pipeline.stages for pipeline in plan.pipelines):
        for s, stage in enumerate(stages):
            beside = {libraries[rank] for x in (stages[s - 1], stages[(s + 1) % len(stages)]) for rank in x.ranks}
            for unit in stage.units if len(stages) > 1 else ():
                posted = (HOST_LOOKAHEAD - LOOKAHEAD) * unit.micro_batch_tokens * spec.hidden_size * item
                more |= {r: posted // unit.tp for r in unit.ranks if not libraries[r] or libraries[r] not in beside}
    return more


def format_communicators(ranks: Sequence[int], cluster: Cluster) -> list[str]:
    """A line per vendor: what the estimate takes, and where that is from."""
    lines = {}
    for chip in (cluster.chip_of(rank) for rank in ranks):
        if chip.speed is None:
            communicator = chip.communicator
            lines[chip.name] = (
                f"communicators of {chip.name}: {format_bytes(communicator.each)} each and "
                f"{format_bytes(communicator.peer)} per peer, "
                f"at least {format_bytes(communicator.least)} ({communicator.source})"
            )
    return list(lines.values())
