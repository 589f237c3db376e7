"""Which documents of which paths a split (train, valid, test) is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from hetero_megatron.data.blend import BlendedDataset
from hetero_megatron.data.config import DEFAULT_SPLIT, SPLITS, DataConfig, parse_blend, parse_split, split_documents
from hetero_megatron.data.corpus import is_indexed
from hetero_megatron.data.sample import Dataset
from hetero_megatron.errors import UserError

D = TypeVar("D", bound=Dataset)
_ALL: tuple[Fraction, Fraction, Fraction] = (Fraction(1), Fraction(0), Fraction(0))
_TEST = 2


@dataclass(frozen=True)
class SplitPaths:
    """The paths of one split.

    Attributes:
        name: train, valid or test.
        flag: the flag that named the paths.
        weights: of the paths in a blend; None: by size.
        shares: of each path's documents for train, valid and test; ``which`` of them is meant.
        given: --split, None: the default.
    """

    name: str
    flag: str
    paths: list[str]
    weights: list[float] | None
    shares: tuple[Fraction, Fraction, Fraction]
    which: int
    given: str | None

    def documents(self, count: int, path: str, what: str) -> tuple[int, int] | None:
        """The half-open range of a path's ``count`` documents; None: the default split leaves none to test on.

        Args:
            what: a document is called in the refusal.

        Raises:
            UserError: there is none.
        """
        interval = split_documents(count, self.shares)[self.which]
        if interval[0] < interval[1]:
            return interval
        if self.which == _TEST and self.given is None:
            return None
        raise UserError(
            f"leaves no {what} of {path} ({count} in all) for {self.name}",
            field="--split" if self.flag == "--data-path" else self.flag,
            value=self.given or f"{DEFAULT_SPLIT} (the default)",
            accepted=f"a larger share, a --{self.name}-data-path of its own"
            + {"train": "", "valid": ", or --eval-iters 0"}.get(self.name, ", or no share (0)"),
        )


def split_dataset(split: SplitPaths, part: Callable[[str], D | None], size: Callable[[D], int]) -> Dataset | None:
    """The data set of a split's paths: one, or a blend by the given weights or by ``size``; None: ``part`` made none of
    some path."""
    parts = []
    for path in split.paths:
        dataset = part(path)
        if dataset is None:
            return None
        parts.append(dataset)
    if len(parts) == 1:
        return parts[0]
    return BlendedDataset(parts, split.weights or [Fraction(size(dataset)) for dataset in parts], split.flag)


def find_split(config: DataConfig, which: int) -> SplitPaths | None:
    """Split ``which`` of data that are not made up; None: nothing is said to test on.

    Raises:
        UserError: no data for it, a blend that is none, or a stream that would have to be cut.
    """
    name, flag, words = SPLITS[which], "--data-path", config.data_path
    shares = parse_split(config.split or DEFAULT_SPLIT)
    streaming = config.dataloader_type == "streaming"
    if words is None:
        flag, words, shares, which = f"--{name}-data-path", config.paths_of(name), _ALL, 0
        if words is None and name == "test":
            return None
        if words is None:
            raise UserError(
                f"{name} samples are needed, but no data is given for them", field=flag,
                accepted="a path, or " + ("--data-path" if name == "train" else "--eval-iters 0"),
            )  # fmt: skip
    elif which == _TEST and (streaming or not shares[which]):
        return None
    elif streaming and (which or parse_split(config.split or "1") != _ALL):
        raise UserError(
            "a stream cannot be split: its length is not known", field="--split", value=config.split or "not given",
            accepted="--train-data-path and --valid-data-path, or --split 1 and --eval-iters 0",
        )  # fmt: skip
    paths, weights = parse_blend(words, flag)
    return SplitPaths(name, flag, paths, weights, shares, which, config.split)


def check_stream(split: SplitPaths, sft: bool) -> None:
    """UserError for paths that cannot be read as they come: text from one, conversations from any by weights."""
    indexed = [path for path in split.paths if path != "stdlib" and is_indexed(path)]
    if not sft and (len(split.paths) > 1 or split.weights):
        raise UserError(
            "cannot stream a blend", field="--dataloader-type", value="streaming", accepted="one path, or single"
        )
    if not sft and indexed:
        raise UserError(
            ".bin/.idx is mapped, not streamed", field="--dataloader-type", value="streaming", accepted="single"
        )
    if sft and len(split.paths) > 1 and split.weights is None:
        raise UserError(
            "streams have no known sizes to be mixed by", field=split.flag, value=" ".join(split.paths),
            accepted="WEIGHT PATH WEIGHT PATH ...",
        )  # fmt: skip
