"""What both of Megatron's formats have in common: named tensors in parts, and the arguments of the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.checkpoint.pickles import Inert
from hetero_megatron.errors import UserError

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Classes whose objects are in checkpoints beside the weights, and are not looked at ("module name").
STAND_INS = re.compile(
    r"(megatron|transformer_engine|modelopt|nemo|lightning|apex|numpy|pathlib|signal|enum)(\..*)? .*"
    r"|argparse Namespace|types SimpleNamespace|_codecs encode|_?io BytesIO|copyreg _reconstructor"
    r"|builtins (getattr|object|set|frozenset|complex|bytearray|slice|range)|__builtin__ (getattr|object|set)"
    r"|collections (defaultdict|deque|Counter)|datetime .*|functools partial"
    r"|torch (Size|device|Generator|Tensor|strided)|torch\.(serialization|_utils|nn\.functional|_C\._nn) .*"
)
# Tensors beside the weights: of other modules' states, of buffers that are computed.
_BESIDE = re.compile(r"(.*\.)?_extra_state(/.*|\d*)|.*rotary_pos_emb\.inv_freq|.*\.local_tokens_per_expert")


@dataclass(frozen=True)
class Part:
    """A tensor, or what one tensor-parallel rank has of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class MegatronTensors:
    """The tensors of one checkpoint by Megatron Core's names, layers numbered through the model.

    Args:
        parts: by tensor-parallel rank; one part is the whole tensor.
        arguments: of the run that wrote it; empty: not stored.
        origin: the directory.
    """

    parts: Mapping[str, list[Part]]
    arguments: Mapping[str, Any]
    origin: str
    form: str

    def vocabulary_rows(self) -> int:
        """Of the embedding, padding included. UserError: there is none."""
        if EMBEDDING not in self.parts:
            raise damaged(f"holds no {EMBEDDING}: it is no GPT of Megatron Core", self.origin)
        return sum(part.shape[0] for part in self.parts[EMBEDDING])


def same_values(parts: Sequence[Part], others: Sequence[Part]) -> bool:
    """Whether two copies of a tensor are equal, part for part."""
    pairs = zip(parts, others, strict=True)
    return all(a.shape == b.shape and torch.equal(a.read(), b.read()) for a, b in pairs)


def is_weight(name: str) -> bool:
    return _BESIDE.fullmatch(name) is None


def arguments(namespace: Any) -> dict[str, Any]:
    """The attributes of a stored ``argparse.Namespace`` that are plain values."""
    attributes = vars(namespace) if isinstance(namespace, Inert) else namespace if isinstance(namespace, dict) else {}
    return {key: value for key, value in attributes.items() if isinstance(key, str) and not isinstance(value, Inert)}


def damaged(problem: str, path: object) -> UserError:
    return UserError(problem, field="SOURCE", value=str(path), accepted="a checkpoint as Megatron-LM wrote it")
