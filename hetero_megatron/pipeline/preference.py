"""The loss of preference pairs: answers' log-probabilities, from the token losses of a row that holds several answers
and whose tokens several ranks may divide; the reference's beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F

from hetero_megatron.comm import Comm, Group
from hetero_megatron.data.batch import Batch, Pairs
from hetero_megatron.pipeline.stage_model import RankStage, StageLoss
from hetero_megatron.pipeline.stage_work import ComparedLoss
from hetero_megatron.plans.experts import sequence_group
from hetero_megatron.spec.preference import Preference

# (chosen: policy less reference [pairs], rejected: the same, the loss) -> losses [pairs]. Of losses without a reference
# the log-probabilities themselves.
_Formula = Callable[[torch.Tensor, torch.Tensor, Preference], torch.Tensor]


def _smoothed(margin: torch.Tensor, rate: float) -> torch.Tensor:
    """Of a label that is wrong with probability ``rate``."""
    return -(1 - rate) * F.logsigmoid(margin) - rate * F.logsigmoid(-margin)


def _robust(c: torch.Tensor, r: torch.Tensor, p: Preference) -> torch.Tensor:
    margin, e = p.beta * (c - r), p.smoothing
    return (-(1 - e) * F.logsigmoid(margin) + e * F.logsigmoid(-margin)) / (1 - 2 * e)


def _exo(c: torch.Tensor, r: torch.Tensor, p: Preference) -> torch.Tensor:
    """The divergence of what the margin says of a pair from its label."""
    margin, e = p.beta * (c - r), torch.tensor(p.smoothing, dtype=c.dtype, device=c.device)
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    return right.exp() * (right - torch.log1p(-e)) + wrong.exp() * (wrong - e.log())


def _nca(c: torch.Tensor, r: torch.Tensor, p: Preference) -> torch.Tensor:
    c, r = p.beta * c, p.beta * r
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-r)


def _odds(c: torch.Tensor, r: torch.Tensor, p: Preference) -> torch.Tensor:
    """ORPO: the chosen answer's own loss, and beta times that of the ratio of odds."""
    odds = (c - torch.log1p(-c.exp())) - (r - torch.log1p(-r.exp()))
    return -c - p.beta * F.logsigmoid(odds)


FORMULAS: Mapping[str, _Formula] = {
    "dpo": lambda c, r, p: _smoothed(p.beta * (c - r), p.smoothing),
    "ipo": lambda c, r, p: (c - r - 1 / (2 * p.beta)).square(),
    "hinge": lambda c, r, p: torch.relu(1 - p.beta * (c - r)),
    "robust": _robust,
    "exo_pair": _exo,
    "nca_pair": _nca,
    "sppo_hard": lambda c, r, p: (c - 0.5 / p.beta).square() + (r + 0.5 / p.beta).square(),
    "apo_zero": lambda c, r, p: torch.sigmoid(-p.beta * c) + torch.sigmoid(p.beta * r),
    "apo_down": lambda c, r, p: torch.sigmoid(p.beta * c) + torch.sigmoid(-p.beta * (c - r)),
    "orpo": _odds,
    "simpo": lambda c, r, p: -F.logsigmoid(p.beta * (c - r) - p.gamma),
    "cpo": lambda c, r, p: _smoothed(p.beta * (c - r), p.smoothing),
}


def pair_losses(
    p: Preference, policy: torch.Tensor, reference: torch.Tensor | None, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses [pairs], sums over the pairs of ``REWARDS``).

    Args:
        policy, reference: log-probabilities of answers, [2 x pairs]: chosen and rejected in turn; ``reference`` None:
            there is none. lengths: tokens of each.
    """
    mean_logps = policy / lengths
    logps = mean_logps if p.averages else policy
    ratio = logps if reference is None else logps - (reference / lengths if p.averages else reference)
    chosen, rejected = ratio[::2], ratio[1::2]
    losses = FORMULAS[p.loss](chosen, rejected, p)
    if p.sft_weight:
        losses = losses - p.sft_weight * mean_logps[::2]
    with torch.no_grad():  # TRL: beside a reference those of whole answers, whatever the loss divides
        shown, shown_ratio = (logps, ratio) if reference is None else (policy, policy - reference)
        rewards = p.beta * shown_ratio[::2], p.beta * shown_ratio[1::2]
        margins = rewards[0] - rewards[1]
        facts = (*rewards, (margins > 0).to(margins.dtype), margins, shown[::2], shown[1::2])
        return losses, torch.stack([fact.detach().sum() for fact in facts])


class Reference:
    """Log-probabilities of answers under the reference, by the number of their pair (two) or example (one): of one
    step, or of all that a run needs."""

    def __init__(self) -> None:
        self.logps: dict[int, tuple[float, ...]] = {}
        self._of_step: dict[tuple[int, ...], torch.Tensor] = {}

    def begin_step(self) -> None:
        self._of_step.clear()

    def put(self, numbers: tuple[int, ...], values: torch.Tensor) -> None:
        """``values``: of a micro-batch, [2 x pairs] or [examples]."""
        self._of_step[numbers] = values

    def of(self, numbers: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """[2 x pairs] or [examples], in the dtype and on the device of ``like``."""
        if numbers in self._of_step:
            return self._of_step[numbers]
        values = [value for number in numbers for value in self.logps[number]]
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    def recorded(self) -> dict[int, tuple[float, ...]]:
        """Those of the step, by pair or example."""
        return {
            number: tuple(logps)
            for numbers, values in self._of_step.items()
            for number, logps in zip(numbers, values.view(len(numbers), -1).tolist(), strict=True)
        }


class _Spoken(Reference):
    """Of every micro-batch of a step, also of those with equal examples: (numbers, log-probabilities)."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def begin_step(self) -> None:
        self.said.clear()

    def put(self, numbers: tuple[int, ...], values: torch.Tensor) -> None:
        self.said.append((numbers, values))


class PairLoss(ComparedLoss):
    """The loss of a stage for preference pairs; called as :class:`StageLoss`.

    Args:
        tokens: the losses of single tokens.
        group: ranks that have tokens of the same sequences as this one.
        parts: of each of them, whether its sums are to be added up: one rank of every TP group.
        counts: whether this rank's unit is the one that counts the pairs of these sequences.
    """

    def __init__(
        self, preference: Preference, tokens: StageLoss, group: Group, parts: Sequence[bool], counts: bool
    ) -> None:
        super().__init__()
        self.preference, self._tokens, self._group, self._counts = preference, tokens, group, counts
        self._parts = [i for i, has_part in enumerate(parts) if has_part]
        self.reference = Reference()
        self._into: Reference | None = None

    @property
    def head(self) -> object:
        return self._tokens.head

    @contextmanager
    def record(self, into: Reference | None = None) -> Iterator[None]:
        """Inside, what is computed are log-probabilities of answers, the reference's or those of ``into``."""
        self._into = into or self.reference
        self._into.begin_step()
        try:
            yield
        finally:
            self._into = None

    def facts(self, device: torch.device) -> torch.Tensor:
        """Sums of the preference's facts over what this rank counts, since :meth:`begin`."""
        number = len(self.preference.facts)
        return self._summed(number, device) if self._counts else torch.zeros(number, device=device)

    def count(self, batch: Batch) -> int:
        """Pairs of a batch, on the ranks that count them."""
        assert batch.pairs is not None
        return len(batch.pairs.numbers) if self._counts else 0

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        """Sum of the losses of the batch's pairs or examples: a tensor [], in at least fp32; 0 on ranks that do not
        count it. Its gradient with respect to ``out`` is this rank's part, in any case."""
        pairs, mask = batch.pairs, batch.loss_mask
        assert pairs is not None and mask is not None, "rows that are no preference pairs"
        losses = self._tokens.losses(out, batch)
        policy = self._sums(losses.detach() * mask, pairs)
        if self._into is not None:
            self._into.put(pairs.numbers, policy)
            return policy.new_zeros(())
        leaf = policy.requires_grad_(torch.is_grad_enabled())
        example_losses, rewards = self._judge(leaf, pairs)
        value = example_losses.sum()
        self._tell(rewards)
        total = value.detach() if self._counts else torch.zeros_like(value)
        if not torch.is_grad_enabled():
            return total
        (slope,) = torch.autograd.grad(value, leaf)
        weights = -slope[pairs.sides] * mask  # of a token's loss, which is the negative of its log-probability
        weighted = (self._tokens.losses(out, batch, weights, seed, losses) * weights).sum()
        return total + (weighted - weighted.detach())

    def _judge(self, policy: torch.Tensor, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """(losses, sums of facts) of answers with these log-probabilities."""
        lengths = torch.tensor(pairs.lengths, dtype=policy.dtype, device=policy.device)
        return pair_losses(self.preference, policy, self._of_reference(pairs, policy.detach()), lengths)

    def _sums(self, losses: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        """Log-probabilities of answers, [2 x pairs], equal on all ranks that have tokens of them."""
        # By products and sums, whose order is fixed: adding to places of a vector is not, on devices.
        in_answer = pairs.sides.flatten() == torch.arange(len(pairs.lengths), device=losses.device)[:, None]
        sums = -(in_answer * losses.flatten()).sum(1)
        if self._group.size == 1:
            return sums
        return self._group.gather_vectors(sums)[self._parts].sum(0)

    def _of_reference(self, pairs: Pairs, policy: torch.Tensor) -> torch.Tensor | None:
        if not self.preference.refers:
            return None
        return torch.zeros_like(policy) if self._rehearsing else self.reference.of(pairs.numbers, policy)


class LabelLoss(PairLoss):
    """The same of answers that are labelled as desired or not, one by one (KTO).

    Attributes:
        beside: what the reference says of prompts with others' answers.
        divergence: of the model from the reference, estimated over the whole batch before it is trained on.
    """

    def __init__(
        self, preference: Preference, tokens: StageLoss, group: Group, parts: Sequence[bool], counts: bool
    ) -> None:
        super().__init__(preference, tokens, group, parts, counts)
        self.beside, self._spoken, self.divergence = Reference(), _Spoken(), 0.0

    def speak(self) -> AbstractContextManager[None]:
        """Inside, what is computed are the model's log-probabilities of prompts with others' answers."""
        return self.record(self._spoken)

    def apart(self) -> tuple[float, int]:
        """Of what :meth:`speak` heard, the sum of model less reference over answers that this rank counts, and their
        number."""
        if not self._spoken.said or not self._counts:
            return 0.0, 0
        differences = torch.cat([logps - self.beside.of(numbers, logps) for numbers, logps in self._spoken.said])
        return float(differences.cpu().double().sum()), len(differences)

    def _judge(self, policy: torch.Tensor, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        p, reference = self.preference, self._of_reference(pairs, policy.detach())
        assert reference is not None, "a loss of labelled answers has a reference"
        ratio = policy - reference
        desired = torch.tensor(pairs.desired, dtype=policy.dtype, device=policy.device)  # 1 or 0
        divergence = self.divergence if p.estimates_kl and not self._rehearsing else 0.0
        losses = torch.sigmoid((1 - 2 * desired) * p.beta * (ratio - divergence))  # 1 - sigmoid of the opposite
        losses = losses * (desired * p.desirable + (1 - desired) * p.undesirable)
        with torch.no_grad():
            rewards = p.beta * ratio.detach()
            sums_by_label = [torch.stack([x * desired, x * (1 - desired)]).sum(1) for x in (rewards, policy.detach())]
            counts = torch.stack([desired.sum(), torch.full_like(desired, divergence).sum()])
            return losses, torch.cat([*sums_by_label, counts])


def pair_loss(here: RankStage, comm: Comm, preference: Preference, tokens: StageLoss) -> PairLoss:
    """The loss of a rank's stage, which has the head; ``tokens``: the losses of single tokens."""
    ranks = sequence_group(here.stage, comm.rank)
    units = [unit for unit in here.stage.units if unit.sequences == here.unit.sequences]
    first_ranks = {unit.ranks[0] for unit in units}
    kind = LabelLoss if preference.unpaired else PairLoss
    return kind(preference, tokens, comm.group(ranks), [rank in first_ranks for rank in ranks], here.unit is units[0])
