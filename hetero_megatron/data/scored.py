"""Data that bring what a teacher said of them, from a file that ``hetero-megatron score`` wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from hetero_megatron.data.sample import Dataset, LikeliestTokens, Sample
from hetero_megatron.data.scores_file import ScoresFile
from hetero_megatron.errors import UserError

KIND = "likeliest tokens"
_DTYPES = tuple(map(np.dtype, ("<i4", "<f4", "<f4")))  # of the fields of LikeliestTokens
_WHOLE = 1e-3  # by how much probabilities in fp32 may miss 1


class ScoredDataset:
    """Samples of a data set with the teacher's likeliest tokens, by the same index.

    Args:
        split: of the file.
        vocab_size: of the student.
        field: the flag that named the file.
    """

    def __init__(self, dataset: Dataset, scores: ScoresFile, split: str, vocab_size: int, field: str) -> None:
        self._dataset, self._split, self._vocab = dataset, split, vocab_size
        self._field, self._path = field, scores.path
        self._arrays = [scores.arrays[f"{split}.{name}"] for name in LikeliestTokens._fields]

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[index]._replace(teacher=self.scores(index))

    def scores(self, index: int) -> LikeliestTokens:
        """Those of a sample. UserError: the file ends before it, or they are no distribution."""
        if not 0 <= index < len(self._arrays[0]):
            raise self._refusal(f"holds {len(self._arrays[0])} samples of {self._split}, not number {index}")
        said = LikeliestTokens(*(array[index] for array in self._arrays))
        least, most = int(said.ids.min()), int(said.ids.max())
        if not 0 <= least <= most < self._vocab:
            wrong = least if least < 0 else most
            raise self._refusal(f"holds token {wrong}, the student's vocabulary has {self._vocab}")
        with np.errstate(over="ignore"):
            total = np.exp(said.logps).sum(-1) + np.exp(said.rest)
        if not (np.abs(total - 1) <= _WHOLE).all():  # NaN is not, either
            raise self._refusal(f"is damaged: the probabilities of sample {index} of {self._split} do not add up to 1")
        return said

    def _refusal(self, problem: str) -> UserError:
        return UserError(problem, field=self._field, value=self._path,
                         accepted="a file that hetero-megatron score wrote for this run")  # fmt: skip


def order_of(dataset: Dataset, samples: int) -> str:
    """Which samples come, of the first ``samples``: 8 hex digits of those with the numbers 0, 1, 2, 4, 8, … each; of
    fewer samples it is the beginning."""
    digits, index = "", 0
    while index < samples:
        sample = dataset[index]
        mask = b"" if sample.loss_mask is None else sample.loss_mask.tobytes()
        digits += hashlib.sha256(sample.tokens.tobytes() + mask).hexdigest()[:8]
        index = 2 * index or 1
    return digits


def check_scores(
    scores: ScoresFile, field: str, facts: Mapping[str, str], splits: Mapping[str, tuple[str, int]],
    length: int, temperature: float,
) -> None:
    """UserError: the file is of another model, tokenizer, data or order, holds too few samples, or is damaged.

    Args:
        splits: by name, the order of a split (:func:`order_of`) and how many of its first samples are read.
        length: tokens of a sample.
    """
    scores.require(field, facts)
    if (stored := scores.header.get("temperature")) != temperature:
        stored = str(stored)[:40]
        problem = f"its log-probabilities are those at temperature {stored}"
        raise UserError(problem, field="--distill-temperature", value=temperature, accepted=stored)
    for split, (order, samples) in splits.items():
        ids, logps, rest = (scores.arrays.get(f"{split}.{name}") for name in LikeliestTokens._fields)
        held = 0 if ids is None or ids.ndim == 0 else len(ids)
        if ids is None or held < samples:
            raise UserError(
                f"holds {held} samples of {split}, the run reads {samples}", field=field,
                value=scores.path, accepted="a file of as many steps and evaluations (hetero-megatron score)",
            )  # fmt: skip
        shape = (held, length, ids.shape[-1])
        shapes = [(array.shape, array.dtype) for array in (ids, logps, rest) if array is not None]
        if ids.size == 0 or shapes != [(shape, _DTYPES[0]), (shape, _DTYPES[1]), (shape[:2], _DTYPES[2])]:
            raise UserError(f"is damaged: arrays of {split} have other shapes or types", field=field,
                            value=scores.path, accepted="a file that hetero-megatron score wrote")  # fmt: skip
        scores.require(field, {f"order of {split}": order}, begins=True)
