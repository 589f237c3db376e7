"""--mock-data: samples computed from (seed, index) without files, with learnable structure; and unigram entropy, the
loss of the best model that ignores context, which a trained model must undercut."""

from __future__ import annotations

import numpy as np

from hetero_megatron.data.packing import PackedDataset
from hetero_megatron.data.sample import Dataset, Sample, document_starts
from hetero_megatron.errors import UserError

_STEPS, _CHANCES = (1, 2, 5, 11), (0.7, 0.15, 0.1, 0.05)  # entropy 0.91 nats
_ACTIVE = 256  # more tokens than this would only make it slower to learn
_DOCUMENTS_PER_SAMPLE = 4


class MockDataset:
    """A random walk over the vocabulary: each token is the previous one plus a step from a short, skewed distribution.

    Args:
        eod: end-of-document token, on average four per sample; all other tokens are smaller.
    """

    def __init__(self, seq_length: int, seed: int, eod: int) -> None:
        if eod < 1:
            raise UserError("mock data needs two tokens", field="--vocab-size", value=eod + 1, accepted=">= 2")
        self.seq_length, self.seed, self._eod = seq_length, seed, eod
        self._active = min(_ACTIVE, eod)

    def __getitem__(self, index: int) -> Sample:
        if index < 0:
            raise IndexError(f"sample {index}")
        words = (self.seed, self.seed >> 32, index, index >> 32)
        draw = np.random.RandomState([word & 0xFFFFFFFF for word in words])
        length = self.seq_length + 1
        steps = draw.choice(_STEPS, size=length, p=_CHANCES)
        steps[0] = draw.randint(self._active)
        tokens = np.cumsum(steps, dtype=np.int64) % self._active
        tokens[draw.random_sample(length) < _DOCUMENTS_PER_SAMPLE / length] = self._eod
        return Sample(tokens, document_starts(tokens, np.zeros(0, np.int64), self._eod))


def unigram_entropy(source: np.ndarray | Dataset, num_samples: int = 256) -> float:
    """Entropy in nats of the tokens of an array, of all of a packed dataset, or of a dataset's first samples."""
    if isinstance(source, PackedDataset):
        tokens = source.all_tokens()
    elif isinstance(source, np.ndarray):
        tokens = source.ravel()
    else:
        tokens = np.concatenate([source[i].tokens[1:] for i in range(num_samples)])
    counts = np.zeros(int(tokens.max()) + 1, np.int64)
    for start in range(0, len(tokens), 2**24):  # bincount copies to int64
        counts += np.bincount(tokens[start : start + 2**24], minlength=len(counts))
    p = counts[counts > 0] / len(tokens)
    return float(-(p * np.log(p)).sum())
