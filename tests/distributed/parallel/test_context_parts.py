"""The parts of context parallelism: tiles, merge, ring schedule, memory bound, chunked loss."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetero_megatron.comm import Comm
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.dry_run.allocator import MemoryTracker
from hetero_megatron.layout.mask import BAND, CAUSAL, FULL, tiles
from hetero_megatron.model.layers import Context
from hetero_megatron.ops.attention_op import attn_merge
from hetero_megatron.ops.block_attention import BlockAttention, KeyHeads, accumulators, attn_merge_, key_heads
from hetero_megatron.ops.gemm import WeightGradients
from hetero_megatron.ops.tile_kernels import FlashCpuKernel, OperatorKernel, ReferenceKernel
from hetero_megatron.parallel.context import ContextAttention, StageAttention
from hetero_megatron.parallel.vocab import in_chunks, vocab_loss
from hetero_megatron.plans.context_plan import (
    Block,
    ContextGroup,
    context_groups,
    make_blocks,
    ring_schedule,
    stage_contexts,
)
from hetero_megatron.plans.shares import merged, nested_zigzag
from tests.distributed.parallel.test_context import make_plan, make_spec, visible_pairs
from tests.support.pool import shared_pool
from tests.support.random_plans import composition
from tests.support.selection import each

# Tiles


def random_intervals(rng: random.Random, length: int) -> tuple[tuple[int, int], ...]:
    cuts = sorted(rng.randint(0, length) for _ in range(2 * rng.randint(0, 3)))
    return merged(list(zip(cuts[::2], cuts[1::2], strict=True)))


@each("seed", range(200))
def test_tiles_cover_what_is_visible_once(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.choice([6, 40, 900])
    queries, keys = random_intervals(rng, length), random_intervals(rng, length)
    window = rng.choice([None, None, 1, 3, 17, 300])
    starts = sorted({0, *(t for t in range(1, length) if rng.random() < 2 / length)}) if rng.random() < 0.5 else [0]
    want = visible_pairs(length, [starts], window, 1)[0]
    q = [t for a, b in queries for t in range(a, b)]
    k = [t for a, b in keys for t in range(a, b)]
    want = want[q][:, k].int()
    got = torch.zeros_like(want)
    for tile in tiles(queries, keys, starts, window):
        part = torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0, dtype=torch.int32)
        if tile.kind != FULL:
            distance = torch.arange(part.shape[0])[:, None] + tile.distance - torch.arange(part.shape[1])[None]
            assert tile.kind == BAND or part.shape[0] == part.shape[1]
            limit = length if tile.kind == CAUSAL else window
            part *= (distance >= 0) & (distance < (limit or length))
        got[tile.q0 : tile.q1, tile.k0 : tile.k1] += part
    assert torch.equal(got, want)


def test_tiles_across_a_window_waste_little() -> None:
    """A window of 4,096 in 65,536 tokens: work is that of the window, not of the triangle."""
    found = tiles([(0, 65536)], [(0, 65536)], (0,), 4096)
    assert sum(t.area for t in found) < 1.15 * 65536 * 4096
    assert all(max(t.q1 - t.q0, t.k1 - t.k0) <= 512 for t in found if t.kind == BAND)


# Merge and kernels


def test_merging_in_parts_equals_softmax_over_all_keys() -> None:
    torch.manual_seed(0)
    scores = 200 * torch.randn(2, 3, 5, 12, dtype=torch.float64)  # exp of these overflows
    scores[:, :, 1] = -torch.inf  # no key at all
    scores[:, :, 2, :4] = -torch.inf  # none in the first part
    values = torch.randn(2, 12, 3, 4, dtype=torch.float64)
    parts = []
    for a, b in ((0, 4), (4, 4), (4, 12)):
        lse = scores[..., a:b].logsumexp(-1)
        weights = (scores[..., a:b] - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        parts.append((torch.einsum("bhqk,bkhd->bqhd", weights, values[:, a:b]), lse))
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(0.0), values)
    out, lse = accumulators(want)
    reference = accumulators(want)
    for part, part_lse in parts:
        attn_merge_(out, lse, part, part_lse)
        reference = attn_merge(*reference, part, part_lse)
    for got, sums in ((out, lse), reference):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sums, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert (out[:, 1] == 0).all() and (lse[:, :, 1] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance, window", [(7, None), (0, None), (2, None), (3, 5), (-2, None), (-3, 4), (20, 6)])
def test_tile_kernels_agree(dtype: torch.dtype, distance: int, window: int | None) -> None:
    torch.manual_seed(1)
    q, grad = (torch.randn(2, 7, 4, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 7, 2, 8, dtype=torch.float64) for _ in range(2))
    exact = ReferenceKernel()
    want = exact.forward(q, k, v, distance, window)
    backward = exact.backward(grad, q, k, v, *want, distance, window)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    kernel = FlashCpuKernel()
    narrow = [x.to(dtype) for x in (q, k, v)]
    got = kernel.forward(*narrow, distance, window)
    found = kernel.backward(grad.to(dtype), *narrow, *got, distance, window)
    for a, b in zip((*want, *backward), (*got, *found), strict=True):
        live = torch.isfinite(a)
        assert torch.equal(live, torch.isfinite(b))
        torch.testing.assert_close(b.double()[live], a[live], rtol=bound, atol=bound)
    via = OperatorKernel(
        lambda q, k, v, sinks, documents, window, at, start, cap, drop: exact.forward(q, k, v, at - start, window),
        lambda g, q, k, v, sinks, o, e, documents, window, at, start, cap, drop: exact.backward(
            g, q, k, v, o, e, at - start, window
        ),
    )
    assert torch.equal(via.forward(q, k, v, distance, window)[0], want[0])
    assert torch.equal(via.backward(grad, q, k, v, *want, distance, window)[1], backward[1])


def test_query_heads_find_their_key_heads() -> None:
    assert key_heads([0, 0, 1, 1]) == KeyHeads(2)
    assert key_heads([]) == KeyHeads(1)
    assert key_heads([0, 1, 1]) == KeyHeads(1, (0, 1, 1))
    assert key_heads([0, 0, 0]) == KeyHeads(3)


def test_the_error_does_not_grow_with_the_number_of_blocks() -> None:
    """fp32 attention in 1, 8 and 64 blocks of keys against fp64."""
    torch.manual_seed(2)
    q, k, v, grad = (torch.randn(1, 512, 2, 16) for _ in range(4))
    errors = []
    exact = [x.double() for x in (q, k, v)]
    want, sums = FlashCpuKernel().forward(*exact, 0, None)
    grads = FlashCpuKernel().backward(grad.double(), *exact, want, sums, 0, None)
    for count in (1, 8, 64):
        attention = BlockAttention(FlashCpuKernel(), KeyHeads(1))
        out, lse = accumulators(q)
        got = [torch.zeros_like(x) for x in (q, k, v)]
        spans = [(i * 512 // count, (i + 1) * 512 // count) for i in range(count)]
        found = [[(None, tile) for tile in tiles([(0, 512)], [span])] for span in spans]
        for (a, b), mine in zip(spans, found, strict=True):
            attention.forward(q, k[:, a:b], v[:, a:b], mine, out, lse)
        for (a, b), mine in zip(spans, found, strict=True):
            attention.backward(grad, q, k[:, a:b], v[:, a:b], out, lse, mine, (got[0], got[1][:, a:b], got[2][:, a:b]))
        pairs = zip((want, *grads), (out, *got), strict=True)
        errors.append(max(float((g.double() - w).norm() / w.norm()) for w, g in pairs))
    assert max(errors) < 2e-6 and errors[2] < 2 * errors[0], errors


# Ring schedule


def groups_of(counts: list[int]) -> list[ContextGroup]:
    owned = nested_zigzag([[n] for n in counts])
    return [ContextGroup(i, (), rows[0]) for i, rows in enumerate(owned)]


@each("seed", range(60))
def test_ring_schedule_brings_every_needed_block_once_without_waiting(seed: int) -> None:
    rng = random.Random(seed)
    counts = composition(rng, rng.randint(8, 400), rng.randint(1, 9))
    groups = groups_of(counts)
    blocks = make_blocks(groups, rng.choice([0, 0, 5, 50]))
    wanted = {(g.index, b) for g in groups for b in range(len(blocks)) if rng.random() < 0.8 and g.num_tokens}

    def needs(group: ContextGroup, block: Block) -> bool:
        return (group.index, blocks.index(block)) in wanted

    schedule = ring_schedule(groups, blocks, needs)
    seen: Counter[tuple[int, int]] = Counter()
    for t, hops in enumerate(schedule.rounds):
        assert len({h.to for h in hops}) == len(hops), "two blocks at once"
        for hop in hops:
            owner = blocks[hop.block].group
            before = [h for h in schedule.rounds[t - 1] if h.block == hop.block] if t else []
            assert hop.source == owner and not before or (before[0].to == hop.source)
            after = [h for h in schedule.rounds[t + 1] if h.block == hop.block] if t + 1 < len(schedule.rounds) else []
            assert hop.last == (not after)
            seen[hop.to, hop.block] += 1
    assert seen == {(g, b): 1 for g, b in wanted if blocks[b].group != g}
    for group in groups:
        mine = [b for row in schedule.local_blocks[group.index] for b in row]
        assert sorted(mine) == [b for b, block in enumerate(blocks) if block.group == group.index]


@pytest.mark.parametrize("counts", [[512] * 8, [2048, 1024, 512, 512], [4096] * 4 + [1024] * 12])
def test_rounds_are_blocks_not_the_largest_shard_times_the_ring(counts: list[int]) -> None:
    groups = groups_of(counts)
    blocks = make_blocks(groups, 128)
    sizes = [block.size for block in blocks]
    assert max(sizes) - min(sizes) <= 1
    schedule = ring_schedule(groups, blocks, lambda group, block: True)
    assert len(schedule.rounds) <= 1.15 * len(blocks) + 2 * len(groups)
    assert all(len(row) <= 1 for rows in schedule.local_blocks.values() for row in rows[:-1])


# Memory


def peak_of(ranks: int, own: int, block: int, transport: str = "ring") -> int:
    """Peak bytes of one rank's attention, forward and backward, by fake tensors."""
    spec = make_spec(4, 2, 16)
    length = ranks * own
    members = [{"ranks": [r], "tokens": [own], "heads": [4]} for r in range(ranks)]
    stage = {"ranks": list(range(ranks)), "context": members, "kv": {"transport": transport, "block": block}}
    plan = make_plan(spec, stage, length, 1)
    (context,) = stage_contexts(spec, plan.pipelines[0].stages[0], length)
    comm = FakeComm(1, torch.device("cpu"))
    comm.create_groups(context_groups(spec, plan.pipelines[0].stages[0]))
    with FakeTensorMode(), MemoryTracker() as memory:
        q = torch.empty(1, own, 4, 16, requires_grad=True)
        k, v = (torch.empty(1, own, 2, 16, requires_grad=True) for _ in range(2))
        shared = StageAttention(context, comm, None)
        ContextAttention(shared)(q, k, v, None, Context(None, {})).sum().backward()
    return memory.peak


@pytest.mark.slow
def test_memory_of_the_ring_is_the_own_shard_and_two_blocks() -> None:
    """With 2 and 3 times the sequence over as many times the ranks, the peak stays; gathering grows."""
    peaks = [peak_of(ranks, 1024, 256) for ranks in (3, 6, 9)]
    assert max(peaks) <= 1.02 * peaks[0], peaks
    gathered = [peak_of(ranks, 1024, 0, "gather") for ranks in (3, 9)]
    assert gathered[1] > 1.8 * gathered[0]
    # At most linear in the own shard, beside the blocks.
    one, two, four = (peak_of(3, own, 512) for own in (1024, 2048, 4096))
    assert 1.5 < (four - two) / (two - one) < 2.05
    # A block costs its keys and values twice, and its gradients (at least fp32) up to four times.
    bytes_per_token = 2 * 2 * 16 * 4
    grown = peak_of(3, 4096, 2048) - four
    assert grown <= 8 * (2048 - 512) * bytes_per_token, grown / (2048 - 512) / bytes_per_token


# Chunked loss


def chunked_rank(comm: Comm, cuts: list[int], chunk: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
    """(loss, dx, dw) of this rank's share of the vocabulary."""
    ranks = list(range(len(cuts) - 1))
    comm.create_groups([ranks])
    if comm.rank not in ranks:
        return None
    torch.manual_seed(3)
    x, weight = torch.randn(2, 9, 8).to(dtype), torch.randn(23, 8).to(dtype)
    labels, seeds = torch.randint(0, 23, (2, 9)), torch.rand(2, 9).to(dtype)
    vocab = (cuts[comm.rank], cuts[comm.rank + 1])
    share = weight[vocab[0] : vocab[1]].clone().requires_grad_()
    x.requires_grad_()
    loss = in_chunks(vocab_loss(WeightGradients(), comm.group(ranks), vocab), chunk, x, share, labels, seeds)
    loss.backward(seeds)
    assert x.grad is not None and share.grad is not None
    return [loss.detach(), x.grad, share.grad]


@pytest.mark.parametrize("cuts", [[0, 23], [0, 5, 5, 23], [0, 20, 23]])
@pytest.mark.parametrize("chunk", [1, 4, 18, 100])
def test_chunked_loss_equals_cross_entropy(cuts: list[int], chunk: int) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(2, 9, 8).double().requires_grad_(), torch.randn(23, 8).double().requires_grad_()
    labels, seeds = torch.randint(0, 23, (2, 9)), torch.rand(2, 9).double()
    want = torch.nn.functional.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")
    want.backward(seeds.flatten())
    assert x.grad is not None and weight.grad is not None
    got = [r for r in shared_pool().run(chunked_rank, cuts, chunk, torch.float64) if r is not None]
    for loss, _, _ in got:
        torch.testing.assert_close(loss, want.detach().view(2, 9), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(g[1] for g in got), x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([g[2] for g in got]), weight.grad, rtol=1e-12, atol=1e-12)


def test_chunked_loss_never_holds_all_logits() -> None:
    comm = FakeComm(0, torch.device("cpu"))
    with FakeTensorMode(), MemoryTracker() as memory:
        x = torch.empty(1, 4096, 8, requires_grad=True)
        weight = torch.empty(1000, 8, requires_grad=True)
        labels = torch.zeros(1, 4096, dtype=torch.int64)
        loss, seeds = vocab_loss(WeightGradients(), comm.group([0]), (0, 1000)), torch.ones(1, 4096)
        in_chunks(loss, 64, x, weight, labels, seeds).sum().backward()
    assert memory.peak < 4096 * 1000 * 4 / 4
