"""The loss of a student beside a teacher: head, cross-entropy and divergence in one, over chunks of tokens and this
rank's share of the vocabulary; no rank has the logits of the whole vocabulary, nor of all its tokens at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hetero_megatron.comm import Comm, Group
from hetero_megatron.data.batch import Batch
from hetero_megatron.model import GPTStage
from hetero_megatron.model.gpt import Head
from hetero_megatron.ops import KernelPlan, softcap
from hetero_megatron.ops.linear_cross_entropy import KnownLoss, with_known_gradient
from hetero_megatron.ops.spec import wide
from hetero_megatron.pipeline.role_scores import TeacherScores
from hetero_megatron.pipeline.stage_model import RankStage
from hetero_megatron.pipeline.stage_work import ComparedLoss
from hetero_megatron.spec.distillation import FACTS, Distillation

PIECES = 6  # of the size of a chunk's logits that are there at once: of both models, and what is made of them


class Known(NamedTuple):
    """What a teacher says of n tokens: its head's input [n, h], or the log-probabilities [n, k] of the tokens ``ids``
    [n, k] int64 of its k likeliest, and of all others together, [n]."""

    hidden: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    logps: torch.Tensor | None = None
    rest: torch.Tensor | None = None


@dataclass(frozen=True)
class LossRows:
    """n tokens of a batch: labels int64 [n], weights with which their losses are added up [n], what the teacher says.
    """

    labels: torch.Tensor
    weights: torch.Tensor
    teacher: Known


class _Share(NamedTuple):
    """Of a chunk: log-probabilities [n, V_local] at the temperature; log-sum-exp and label's loss without it, [n]."""

    logps: torch.Tensor
    normalizer: torch.Tensor
    label_loss: torch.Tensor


class TeacherHead:
    """A teacher's output head on the ranks of the student's, cut as theirs; and the inputs that it gets, by the samples
    of a micro-batch, from the teacher's forward to the student's loss."""

    def __init__(self, head: Head) -> None:
        self.head, self._inputs = head, dict[tuple[int, ...], torch.Tensor]()

    def put(self, samples: tuple[int, ...], x: torch.Tensor) -> None:
        """``x``: [b, s, h]."""
        self._inputs[samples] = x

    def take(self, samples: tuple[int, ...]) -> torch.Tensor:
        return self._inputs.pop(samples)

    def begin_step(self) -> None:
        self._inputs.clear()

    def logits(self, x: torch.Tensor, product: object) -> torch.Tensor:
        """[n, h] -> [n, V_local], in at least fp32."""
        logits: torch.Tensor = product(x, self.head.matrix, self.head.bias)[0]  # type: ignore[operator]
        logits = logits.to(wide(logits.dtype))
        return logits if self.head.softcap is None else softcap(logits, self.head.softcap)


class DistillationLoss(ComparedLoss):
    """The loss of a stage with a head; called as :class:`~hetero_megatron.pipeline.stage_model.StageLoss`.

    Args:
        group: the unit's ranks, which have the same tokens.
        chunk: tokens whose logits exist at once; None: those of a micro-batch.

    Attributes:
        teacher: where it runs on the student's ranks; scores: where it has its own; both None: batches have them.
    """

    def __init__(
        self, d: Distillation, here: RankStage, model: GPTStage, kernels: KernelPlan, group: Group, chunk: int | None
    ) -> None:
        super().__init__()
        self.distillation, self._model, self._group, self._chunk = d, model, group, chunk
        self._vocab, self._product = here.share.vocab, kernels.choices["gemm"].kernel
        self.head: KnownLoss = with_known_gradient(self._losses, self._together, kernels.weight_gradients)
        model.lm_head.in_loss = True
        self.teacher: TeacherHead | None = None
        self.scores: TeacherScores | None = None

    def facts(self, device: torch.device) -> torch.Tensor:
        """Sums of ``FACTS`` over this rank's tokens since :meth:`begin`."""
        return self._summed(len(FACTS), device)

    def count(self, batch: Batch) -> int:
        return batch.num_loss_tokens()

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        """Sum of the losses of the tokens that count: a tensor [], in at least fp32. ``out``: [b, s, h]."""
        labels = batch.labels.flatten()
        weights = torch.ones_like(labels, dtype=wide(out.dtype))
        if batch.loss_mask is not None:
            weights = batch.loss_mask.flatten().to(weights.dtype)
        size = max(len(labels) if self._chunk is None else self._chunk, 1)
        teacher = [None if part is None else part.split(size) for part in self._teacher_likeliest(batch, out)]
        head, total = self._model.lm_head, torch.zeros((), dtype=weights.dtype, device=out.device)
        with_bias = {} if head.bias is None else {"bias": head.bias}
        pieces = zip(out.flatten(0, -2).split(size), labels.split(size), weights.split(size), strict=True)
        for i, (x, targets, counted) in enumerate(pieces):
            rows = LossRows(targets, counted, Known(*(None if part is None else part[i] for part in teacher)))
            seeds = counted * seed if torch.is_grad_enabled() else None
            total = total + (self.head(x, head.matrix, rows, seeds, **with_bias) * counted).sum()
        return total

    def _teacher_likeliest(self, batch: Batch, out: torch.Tensor) -> Known:
        """What the teacher said of the batch's tokens, in rows."""
        if self.teacher is not None:
            if self._rehearsing:
                return Known(out.new_zeros(batch.labels.numel(), self.teacher.head.matrix.shape[1]))
            return Known(self.teacher.take(batch.samples).flatten(0, -2))
        if self.scores is not None:
            like = out.new_empty(0, dtype=wide(out.dtype))
            if self._rehearsing:
                return Known(None, *self.scores.empty(batch.labels.numel(), like))
            return Known(None, *self.scores.of(batch.samples, like))
        said = batch.teacher
        assert said is not None, "a batch without a teacher"
        kind = wide(out.dtype)
        return Known(
            None, said.ids.flatten(0, 1).long(), said.logps.flatten(0, 1).to(kind), said.rest.flatten().to(kind)
        )

    @torch.no_grad()
    def _losses(
        self, x: torch.Tensor, weight: torch.Tensor, rows: LossRows, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits, _ = self._logits(x, weight, bias)
        return self._compare(logits, rows)[0]

    def _together(
        self, x: torch.Tensor, weight: torch.Tensor, rows: LossRows, dloss: torch.Tensor,
        into: torch.Tensor | None = None, beta: float = 1.0, bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, object, object, object]:  # fmt: skip
        """Losses [n], and the gradients of x, weight and bias, as ``with_known_gradient`` wants them."""
        logits, slope = self._logits(x, weight, bias)
        losses, dlogits = self._compare(logits, rows)
        del logits
        dy = (dlogits if slope is None else dlogits * slope).mul_(dloss[:, None]).to(x.dtype)
        del dlogits, slope
        dx = self._product.parts["input"](dy, weight)
        dw = self._product.parts["weight"](dy, x, into, beta) if weight.requires_grad else None
        return losses, dx, dw, dy.sum(0) if bias is not None and bias.requires_grad else None

    def _logits(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[n, V_local] in at least fp32, and the slope of their cap."""
        logits: torch.Tensor = self._product.forward(x, weight, bias)[0]
        logits, cap = logits.to(wide(logits.dtype)), self._model.lm_head.softcap
        if cap is None:
            return logits, None
        logits = softcap(logits, cap)
        return logits, 1 - (logits / cap).square()

    def _compare(self, logits: torch.Tensor, rows: LossRows) -> tuple[torch.Tensor, torch.Tensor]:
        """(losses [n], their gradient with respect to the logits, [n, V_local])."""
        d, start = self.distillation, self._vocab[0]
        share = self._shares(logits, rows.labels)
        if rows.teacher.hidden is not None:
            divergence, slopes = self._beside_logits(share.logps, rows.teacher.hidden)
        else:
            divergence, slopes = self._beside_likeliest(share.logps, rows.teacher)
        token_facts = torch.stack([share.label_loss, divergence]).detach()
        self._tell((token_facts * rows.weights).sum(1))
        losses = (1 - d.weight) * share.label_loss + d.weight * d.temperature**2 * divergence
        slopes.mul_(d.weight * d.temperature)
        if d.weight < 1:
            mine, local = _shard_ids(rows.labels, start, logits.shape[1])
            slopes.add_((logits - share.normalizer[:, None]).exp_(), alpha=1 - d.weight)
            if logits.shape[1]:
                slopes.scatter_add_(1, local[:, None], mine[:, None].to(slopes.dtype) * (d.weight - 1))
        return losses, slopes

    def _shares(self, logits: torch.Tensor, labels: torch.Tensor) -> _Share:
        """Log-probabilities over the whole vocabulary, of this rank's part of it."""
        t, (mine, local) = self.distillation.temperature, _shard_ids(labels, self._vocab[0], logits.shape[1])
        target = torch.zeros_like(labels, dtype=logits.dtype)
        if logits.shape[1]:
            target = torch.where(mine, logits.gather(1, local[:, None]).squeeze(1), 0.0)
        plain, hot, targets = _normalizers(logits, (1.0, t), self._group, torch.stack([target, mine.to(target.dtype)]))
        target, owners = targets.unbind()
        # A label outside of the vocabulary must not pass unseen.
        label_loss = (plain - target).masked_fill(owners == 0, torch.nan)
        return _Share(logits / t - hot[:, None], plain, label_loss)

    def _beside_logits(self, student: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(divergence [n], its gradient with respect to logits / temperature)."""
        assert self.teacher is not None
        t = self.distillation.temperature
        teacher = self.teacher.logits(hidden, self._product.forward)
        (normalizer, _) = _normalizers(teacher, (t,), self._group)
        terms, slopes = divergence_terms(student, teacher.div_(t).sub_(normalizer[:, None]), self.distillation)
        divergence, mean = _sum_over(self._group, torch.stack([terms.sum(1), slopes.sum(1)])).unbind()
        return divergence, slopes - student.exp().mul_(mean[:, None])

    def _beside_likeliest(self, student: torch.Tensor, said: Known) -> tuple[torch.Tensor, torch.Tensor]:
        """The same over k + 1 outcomes: the teacher's likeliest tokens, and any other."""
        assert said.ids is not None and said.logps is not None and said.rest is not None
        mine, local = _shard_ids(said.ids, self._vocab[0], student.shape[1])
        at, other, others = torch.zeros_like(said.logps), torch.full_like(said.rest, -torch.inf), student
        if student.shape[1]:
            at = torch.where(mine, student.gather(1, local), 0.0)
            # Tokens of others' shares stand at a local place, too: they must not hide what is there.
            hidden = torch.zeros_like(student).scatter_add_(1, local, mine.to(student.dtype))
            others = student.masked_fill(hidden > 0, -torch.inf)
            other = others.logsumexp(1)  # a tail that fp32 has no probabilities for has logarithms
        mine_of = torch.cat([at.t(), other[None]])
        every = self._group.gather_vectors(mine_of.reshape(-1)).view(self._group.size, *mine_of.shape)
        outcomes = torch.cat([every[:, :-1].sum(0), every[:, -1:].logsumexp(0)]).t()
        teacher = torch.cat([said.logps, said.rest[:, None]], 1)
        terms, slopes = divergence_terms(outcomes, teacher, self.distillation)
        # Of each other token, its part of what all of them have in common.
        gradient = (others - outcomes[:, -1:]).exp_().mul_(slopes[:, -1:])
        gradient.sub_(student.exp().mul_(slopes.sum(1, keepdim=True)))
        if student.shape[1]:
            gradient.scatter_add_(1, local, torch.where(mine, slopes[:, :-1], 0.0))
        return terms.sum(1), gradient


def _shard_ids(ids: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether they are among the ``size`` tokens from ``start`` on, and where; of others any place there."""
    return (ids >= start) & (ids < start + size), (ids - start).clamp(0, max(size - 1, 0))


def _sum_over(group: Group, values: torch.Tensor) -> torch.Tensor:
    """In the order of the ranks, so equal on all of them."""
    return group.gather_vectors(values.reshape(-1)).view(group.size, *values.shape).sum(0)


def _normalizers(
    logits: torch.Tensor, temperatures: tuple[float, ...], group: Group, more: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Log-sum-exp over the whole vocabulary of logits [n, V_local] by each temperature, [n] each, and the sum over the
    ranks of ``more`` [m, n]: one exchange."""
    rows = len(logits)
    top = logits.amax(1) if logits.shape[1] else logits.new_full((rows,), -torch.inf)
    shifted = logits - top[:, None]
    sums = [(shifted / t).exp().sum(1) for t in temperatures]
    mine = torch.stack([top, *sums, *(() if more is None else more)])
    tops, *every = group.gather_vectors(mine.reshape(-1)).view(group.size, *mine.shape).unbind(1)
    peak = tops.amax(0)
    log_sum_exps = [
        peak / t + (part * ((tops - peak) / t).exp()).sum(0).log() for t, part in zip(temperatures, every, strict=False)
    ]
    others = every[len(temperatures) :]
    return (*log_sum_exps, torch.stack(others).sum(1) if others else logits.new_zeros(0, rows))


def distillation_loss(
    here: RankStage, comm: Comm, d: Distillation, model: GPTStage, kernels: KernelPlan, dtype: torch.dtype,
    logits_bytes: int,
) -> DistillationLoss:  # fmt: skip
    """The loss of a rank's stage, which has the head."""
    chunk = here.loss_chunk(dtype, logits_bytes // PIECES)
    return DistillationLoss(d, here, model, kernels, comm.group(here.unit.ranks), chunk)


def divergence_terms(
    student: torch.Tensor, teacher: torch.Tensor, d: Distillation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of log-probabilities p and q of the same outcomes, [..., n] each, -inf where one is impossible:

    Returns:
        terms [..., n], whose sum over all outcomes is the divergence;
        slopes [..., n]: p times the derivative with respect to p, up to a multiple of p: with their sum s over all
        outcomes, the gradient with respect to the student's logits is slopes - p s.
    """
    p, q = student.exp(), teacher.exp()
    if d.loss == "forward_kl":
        return _weighted(q, teacher - student), -q
    if d.loss == "reverse_kl":
        terms = _weighted(p, student - teacher)
        return terms, terms
    mixture = torch.logaddexp(teacher + math.log(d.js_beta), student + math.log1p(-d.js_beta))
    student_terms = (1 - d.js_beta) * _weighted(p, student - mixture)
    return d.js_beta * _weighted(q, teacher - mixture) + student_terms, student_terms


def _weighted(probability: torch.Tensor, logarithm: torch.Tensor) -> torch.Tensor:
    """0 log 0 is 0."""
    return torch.where(probability > 0, probability * logarithm, 0.0)
