"""Datasets addressed by global sample index, so that the content of a sample does not depend on which rank computes it.

``build_datasets`` and everything up to a ``Sample`` is NumPy; only ``data.batch`` and ``data.loader`` import torch.
"""

from hetero_megatron.data.build import Datasets, build_datasets, config_tokenizer, reads_text, refuse_bytes
from hetero_megatron.data.config import DataConfig, build_tokenizer
from hetero_megatron.data.sample import Dataset, Sample
from hetero_megatron.data.tokenizers import Tokenizer

__all__ = [
    "DataConfig",
    "Dataset",
    "Datasets",
    "Sample",
    "Tokenizer",
    "build_datasets",
    "build_tokenizer",
    "config_tokenizer",
    "reads_text",
    "refuse_bytes",
]
