"""A model's likeliest next tokens: found over a vocabulary that ranks divide, and brought to the plan's first rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hetero_megatron.comm import Comm, Group
from hetero_megatron.data.batch import Batch
from hetero_megatron.model import GPTStage
from hetero_megatron.ops import KernelPlan, softcap
from hetero_megatron.ops.spec import wide
from hetero_megatron.pipeline.stage_model import RankStage
from hetero_megatron.plans import Plan
from hetero_megatron.plans.shares import head_micro_batches

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids int32 and log-probabilities [.., k], of all others [..]


class Likeliest:
    """Takes the place of the loss of a stage with a head.

    Args:
        group: the unit's ranks; chunk: tokens whose logits exist at once; None: those of a micro-batch.
        k: how many tokens of each position; temperature: by which logits are divided.

    Attributes:
        packed_rows: by the samples of a micro-batch, [b, s, 2 k + 1] int32: ids, then bits of fp32 log-probabilities,
            the last that of all other tokens.
    """

    def __init__(
        self, here: RankStage, model: GPTStage, kernels: KernelPlan, group: Group, chunk: int | None, k: int,
        temperature: float,
    ) -> None:  # fmt: skip
        self._head, self._product, self._group = model.lm_head, kernels.choices["gemm"].kernel, group
        self._head.in_loss = True
        self._start, self._chunk, self._k, self._temperature = here.share.vocab[0], chunk, k, temperature
        self.packed_rows: dict[tuple[int, ...], torch.Tensor] = {}

    def count(self, batch: Batch) -> int:
        return 0

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        rows = out.flatten(0, -2)
        parts = [self._of(x) for x in rows.split(max(len(rows) if self._chunk is None else self._chunk, 1))]
        packed = [torch.cat([ids, torch.cat([logps, rest[:, None]], 1).view(torch.int32)], 1)
                  for ids, logps, rest in parts]  # fmt: skip
        self.packed_rows[batch.samples] = torch.cat(packed).view(*out.shape[:2], 2 * self._k + 1)
        return out.new_zeros(())

    def _of(self, x: torch.Tensor) -> Rows:
        """Of n head inputs [n, h]."""
        logits: torch.Tensor = self._product.forward(x, self._head.matrix, self._head.bias)[0]
        logits = logits.to(wide(logits.dtype))
        if self._head.softcap is not None:
            logits = softcap(logits, self._head.softcap)
        logits = logits / self._temperature
        few = min(self._k, logits.shape[1])
        values, ids = logits.topk(few, 1)
        mine = logits.new_full((2, len(x), self._k), -torch.inf)
        mine[0, :, :few], mine[1, :, :few] = values, (ids + self._start).to(logits.dtype)  # whole numbers, exactly
        every = self._group.gather_vectors(mine.flatten()).view(self._group.size, *mine.shape)
        values, names = (torch.cat(list(every[:, i]), 1) for i in range(2))
        best, at = values.topk(self._k, 1)
        chosen = names.gather(1, at).long()
        local = chosen - self._start
        local_mask = (local >= 0) & (local < logits.shape[1])
        best, others = best - best[:, :1], logits - best[:, :1]  # less the largest of all, of any rank
        other = torch.full_like(best[:, 0], -torch.inf)
        if logits.shape[1]:
            columns = local.clamp(0, logits.shape[1] - 1)
            hidden = torch.zeros_like(others).scatter_add_(1, columns, local_mask.to(others.dtype))
            other = others.masked_fill_(hidden > 0, -torch.inf).logsumexp(1)
        rest = self._group.gather_vectors(other).logsumexp(0)  # of a tail that fp32 has no probabilities for, too
        total = torch.logaddexp(rest, best.logsumexp(1))
        return chosen.int(), (best - total[:, None]).float(), (rest - total).float()


def head_ranks(plan: Plan) -> set[int]:
    """The first rank of each unit with a head: those that know what was found."""
    return {unit.ranks[0] for stage in plan.stages if stage.head for unit in stage.units}


def unpacked(rows: torch.Tensor) -> Rows:
    """[.., 2 k + 1] int32, as :attr:`Likeliest.packed_rows` has them: k ids, and k + 1 log-probabilities in fp32."""
    k = rows.shape[-1] // 2
    logps = rows[..., k:].contiguous().view(torch.float32)
    return rows[..., :k], logps[..., :k], logps[..., k]


def gather_rows(
    comm: Comm, plan: Plan, first_sample: int, batch_size: int, k: int, mine: Likeliest | None
) -> Iterator[tuple[range, list[int], Rows]]:
    """What the ranks with a head found in a batch, on the plan's first rank; on others nothing. Called on all ranks.

    Yields:
        samples; tokens of each; their rows, [samples, tokens, ..], in host memory.
    """
    to, sends = plan.ranks[0], []
    for tag, unit, (begin, end) in head_micro_batches(plan, batch_size):
        rows, source = range(first_sample + begin, first_sample + end), unit.ranks[0]
        if not len(rows) or comm.rank not in (source, to):
            continue
        if comm.rank == source:
            assert mine is not None
            packed_rows = mine.packed_rows.pop(tuple(rows)).contiguous()
            if source != to:
                sends.append(comm.isend(packed_rows, to, tag))
                continue
        else:
            packed_rows = torch.empty(len(rows), unit.num_tokens, 2 * k + 1, dtype=torch.int32, device=comm.device)
            comm.irecv(packed_rows, source, tag).wait()
        yield rows, [t for i, j in unit.tokens for t in range(i, j)], unpacked(packed_rows.cpu())
    for send in sends:
        send.wait()
    if mine is not None:
        mine.packed_rows.clear()
