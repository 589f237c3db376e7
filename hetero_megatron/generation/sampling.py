"""Choosing the next token: scores of a row's next token, as the settings of generation_config.json change them, in
transformers' order, and the draw."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hetero_megatron.generation.settings import Filters, ScoreSettings


@dataclass(frozen=True)
class PromptRow:
    """A prompt with what has been answered so far.

    Args:
        number: of the prompt among all of the job.
        most: tokens that the answer may have.
    """

    number: int
    prompt: Sequence[int]
    answer: list[int]
    most: int

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.answer]


def processed(scores: torch.Tensor, row: PromptRow, settings: ScoreSettings, ends: Sequence[int]) -> torch.Tensor:
    """``scores`` [vocabulary], in at least fp32, of the token after ``row``; ``ends``: ids that end an answer."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
    ids, end_ids = row.ids, _inside(ends, scores)
    for step in (_biased, _penalised, _without_repeats, _of_length, _forced, _decayed, _suppressed):
        scores = step(scores, row, ids, settings, end_ids)
    return scores


def _biased(
    s: torch.Tensor, row: PromptRow, ids: list[int], settings: ScoreSettings, ends: Sequence[int]
) -> torch.Tensor:
    return _add(s, ids, settings.sequence_bias)


def _add(scores: torch.Tensor, ids: list[int], biases: Sequence[tuple[tuple[int, ...], float]]) -> torch.Tensor:
    """Add a bias to the last token of each sequence whose other tokens ``ids`` end with."""
    for sequence, bias in biases:
        prefix = sequence[:-1]
        if len(prefix) <= len(ids) and tuple(ids[len(ids) - len(prefix) :]) == prefix:
            scores[sequence[-1]] += bias
    return scores


def _penalised(
    s: torch.Tensor, row: PromptRow, ids: list[int], settings: ScoreSettings, ends: Sequence[int]
) -> torch.Tensor:
    s = _divide(s, row.prompt, 1 / settings.encoder_repetition_penalty)
    return _divide(s, ids, settings.repetition_penalty)


def _divide(scores: torch.Tensor, ids: Sequence[int], penalty: float) -> torch.Tensor:
    if penalty == 1:
        return scores
    indices = _inside(ids, scores)
    chosen_scores = scores[indices]
    scores[indices] = torch.where(chosen_scores < 0, chosen_scores * penalty, chosen_scores / penalty)
    return scores


def _without_repeats(
    s: torch.Tensor, row: PromptRow, ids: list[int], settings: ScoreSettings, ends: Sequence[int]
) -> torch.Tensor:
    for size, past in ((settings.no_repeat_ngram_size, ids), (settings.encoder_no_repeat_ngram_size, row.prompt)):
        if size and len(ids) >= size - 1:
            last = ids[len(ids) - size + 1 :]
            starts = range(len(past) - size + 1)
            s[_inside([past[i + size - 1] for i in starts if list(past[i : i + size - 1]) == last], s)] = -math.inf
    words = [word for word in settings.bad_words_ids if not (len(word) == 1 and word[0] in ends)]
    return _add(s, ids, [(word, -math.inf) for word in words])


def _of_length(
    s: torch.Tensor, row: PromptRow, ids: list[int], settings: ScoreSettings, ends: Sequence[int]
) -> torch.Tensor:
    min_new_tokens = settings.min_new_tokens
    if len(ids) < settings.min_length if min_new_tokens is None else len(row.answer) < min_new_tokens:
        s[list(ends)] = -math.inf
    return s


def _forced(
    s: torch.Tensor, row: PromptRow, ids: list[int], settings: ScoreSettings, ends: Sequence[int]
) -> torch.Tensor:
    if settings.forced_bos_token_id is not None and len(ids) == 1:
        s = _only(s, (settings.forced_bos_token_id,))
    if settings.forced_eos_token_id and len(row.answer) == row.most - 1:
        s = _only(s, settings.forced_eos_token_id)
    if settings.remove_invalid_values:
        limits = torch.finfo(s.dtype)
        s = torch.nan_to_num(s, nan=0.0, posinf=limits.max, neginf=limits.min)
    return s


def _only(scores: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    scores = torch.full_like(scores, -math.inf)
    scores[list(ids)] = 0
    return scores


def _decayed(
    s: torch.Tensor, row: PromptRow, ids: list[int], settings: ScoreSettings, ends: Sequence[int]
) -> torch.Tensor:
    if settings.exponential_decay_length_penalty is None:
        return s
    start, factor = settings.exponential_decay_length_penalty
    if len(row.answer) > start:
        end_scores = s[list(ends)]
        try:
            growth = factor ** (len(row.answer) - start) - 1
        except OverflowError:
            growth = sys.float_info.max
        s[list(ends)] = torch.where(end_scores.isfinite(), end_scores + end_scores.abs() * growth, end_scores)
    return s


def _suppressed(
    s: torch.Tensor, row: PromptRow, ids: list[int], settings: ScoreSettings, ends: Sequence[int]
) -> torch.Tensor:
    s[_inside(settings.suppress_tokens, s)] = -math.inf
    forced_tokens = len(row.prompt) == 1 and settings.forced_bos_token_id is not None
    if len(row.answer) == forced_tokens:
        s[_inside(settings.begin_suppress_tokens, s)] = -math.inf
    return s


def _inside(ids: Sequence[int], scores: torch.Tensor) -> list[int]:
    """Those that the model can generate, once each."""
    return [i for i in dict.fromkeys(ids) if 0 <= i < len(scores)]


def filtered(scores: torch.Tensor, filters: Filters) -> torch.Tensor:
    """``scores`` [b, vocabulary] with -inf for what is not drawn; of each row at least one token is left."""
    steps: tuple[tuple[float | None, Callable[[torch.Tensor, float], torch.Tensor]], ...] = (
        (filters.top_h, _top_h), (filters.top_k, _top_k), (filters.top_p, _top_p), (filters.min_p, _min_p),
        (filters.typical_p, _typical), (filters.epsilon_cutoff, _epsilon), (filters.eta_cutoff, _eta),
    )  # fmt: skip
    for value, dropped in steps:
        if value is not None:
            scores = scores.masked_fill(dropped(scores, value), -math.inf)
    return scores


def _entropy(scores: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(scores.softmax(-1)).sum(-1, keepdim=True)


def _top_h(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Of the 100 most likely tokens the first ones with this share of their entropy (Potraghloo et al., 2025)."""
    top, order = scores.topk(min(100, scores.shape[-1]))
    terms = torch.special.entr(top.softmax(-1))
    keep = (terms.cumsum(-1) <= share * _entropy(top)) & (top > -math.inf)
    keep[:, 0] = True
    return torch.ones_like(scores, dtype=torch.bool).scatter(-1, order, ~keep)


def _top_k(scores: torch.Tensor, count: float) -> torch.Tensor:
    return scores < scores.topk(min(int(count), scores.shape[-1])).values[:, -1:]


def _top_p(scores: torch.Tensor, share: float) -> torch.Tensor:
    """The smallest set of most likely tokens with at least this probability together (Holtzman et al., 2020)."""
    values, order = torch.sort(scores, descending=True, dim=-1)
    probabilities = values.softmax(-1)
    dropped = probabilities.cumsum(-1) - probabilities >= share
    dropped[:, 0] = False
    return dropped.scatter(-1, order, dropped)


def _min_p(scores: torch.Tensor, share: float) -> torch.Tensor:
    probabilities = scores.softmax(-1)
    return probabilities < share * probabilities.amax(-1, keepdim=True)


def _typical(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """Tokens whose surprise is nearest to the entropy (Meister et al., 2022)."""
    logs = scores.log_softmax(-1)
    deviation, order = torch.sort((-logs - _entropy(scores)).abs(), dim=-1)
    reached = scores.gather(-1, order).softmax(-1).cumsum(-1) < mass
    last = reached.sum(-1, keepdim=True).clamp_max(scores.shape[-1] - 1)
    dropped = deviation > deviation.gather(-1, last)
    dropped[:, 0] = False
    return dropped.scatter(-1, order, dropped)


def _epsilon(scores: torch.Tensor, least: float) -> torch.Tensor:
    return _below(scores, torch.tensor(least))


def _eta(scores: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Hewitt et al., 2022."""
    return _below(scores, torch.clamp_max(math.sqrt(epsilon) * torch.exp(-_entropy(scores)), epsilon))


def _below(scores: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Less likely than ``least``, but for the most likely one."""
    return (scores.softmax(-1) < least) & (scores < scores.amax(-1, keepdim=True))


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0: the most likely token. Draws depend on (seed, prompt, position in the answer), not on batches
    or plans.

    Args:
        filters: which tokens are drawn from.
        settings: what changes scores before that, and ``ends``, the ids that end an answer, as they count there.
    """

    temperature: float = 0.0
    filters: Filters = field(default_factory=Filters)
    seed: int = 1234
    settings: ScoreSettings = field(default_factory=ScoreSettings)
    ends: tuple[int, ...] = ()

    def choose(self, logits: torch.Tensor, rows: Sequence[PromptRow]) -> torch.Tensor:
        """Next token of every row, int64 [b]; logits: [b, vocabulary]."""
        if self.settings.changes_scores:
            pairs = zip(logits, rows, strict=True)
            logits = torch.stack([processed(scores, row, self.settings, self.ends) for scores, row in pairs])
        best = logits.argmax(-1)
        if self.temperature == 0:
            return best
        top = logits.double().gather(-1, best[:, None])
        # From the most likely one down: of the smallest temperature that is a number, nothing overflows upwards.
        scores = filtered((logits.double() - top) / self.temperature, self.filters)
        values, order = torch.sort(scores, descending=True, dim=-1)
        probabilities = torch.softmax(values, -1)
        sums = probabilities.cumsum(-1)
        draws = self._draws(rows)
        aim = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * sums[:, -1:]
        last = ((probabilities > 0).sum(-1, keepdim=True) - 1).clamp_min(0)
        drawn = torch.searchsorted(sums, aim, right=True).clamp_max(last)
        # No distribution where scores are not numbers, or all tokens are forbidden.
        return torch.where(top[:, 0].abs() < math.inf, order.gather(-1, drawn)[:, 0], best)

    def _draws(self, rows: Sequence[PromptRow]) -> list[float]:
        """A number in [0, 1) for the next token of every row."""
        generator, draws = np.random.RandomState(0), list[float]()
        for row in rows:  # seeding it again takes a tenth of making another one
            generator.seed([self.seed & 0xFFFFFFFF, row.number, len(row.answer)])
            draws.append(generator.random_sample())
        return draws
