"""Data that bring what a teacher said of them, from a file that ``hetero-megatron score`` wrote."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_megatron.data.sample import Dataset, LikeliestTokens, Sample
from hetero_megatron.data.scores_file import ScoresFile
from hetero_megatron.errors import UserError

KIND = "likeliest tokens"


class ScoredDataset:
    """Samples of a data set with the teacher's likeliest tokens, by the same index.

    Args:
        split: of the file.
    """

    def __init__(self, dataset: Dataset, scores: ScoresFile, split: str) -> None:
        self._dataset = dataset
        self._arrays = [scores.arrays[f"{split}.{name}"] for name in LikeliestTokens._fields]

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[index]._replace(teacher=LikeliestTokens(*(array[index] for array in self._arrays)))


def check_scores(
    scores: ScoresFile, field: str, facts: Mapping[str, str], splits: Mapping[str, tuple[str, int]],
    temperature: float,
) -> None:
    """UserError: the file is of another model, tokenizer, data or order, or holds too few samples.

    Args:
        splits: by name, the fingerprint of a split and how many of its first samples are read.
    """
    scores.require(field, facts)
    if (stored := scores.header.get("temperature")) != temperature:
        problem = f"its log-probabilities are those at temperature {stored}"
        raise UserError(problem, field="--distill-temperature", value=temperature, accepted=str(stored))
    for split, (order, samples) in splits.items():
        scores.require(field, {f"order of {split}": order})
        ids = scores.arrays.get(f"{split}.ids")
        if ids is None or len(ids) < samples:
            raise UserError(
                f"holds {0 if ids is None else len(ids)} samples of {split}, the run reads {samples}", field=field,
                value=scores.path, accepted="a file of as many steps and evaluations (hetero-megatron score)",
            )  # fmt: skip
