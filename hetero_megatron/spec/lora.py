"""Low-rank adapters (LoRA): the base is frozen, and some matrices W become W + scale B A with small A and B; with DoRA
each of their rows is scaled to a length of its own, which is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.dropout import check_rate

MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")  # in a mixture of experts, those of the routed experts
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *MLP_TARGETS)
# Of multi-head latent attention, where somebody names them.
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
EVERY_TARGET = TARGETS + LATENT_TARGETS
BASE_DTYPES = ("int8", "nf4")
NF4_BLOCK = 64  # elements of a row that share a largest magnitude, in 4 bits
NF4_GROUP = 256  # blocks whose magnitudes share one
NF4_TABLES = 16 + 256  # numbers that bits stand for
NF4_CHUNK = 1 << 21  # elements that are made of 4 bits at once, and bytes that each takes then: indices, and fp32 twice
NF4_MAKING = 9
RESIDUALS = ("pissa", "olora")
MAX_RANK = 1 << 14
LEAST_ALPHA, MOST_ALPHA = 1e-6, 1e9  # so that alpha / rank times a product is a number in fp32 and bf16


def nf4_blocks(start: int, stop: int) -> tuple[int, int]:
    """The blocks of a row in which some of its columns are, half-open."""
    return start // NF4_BLOCK, -(-stop // NF4_BLOCK) if stop > start else start // NF4_BLOCK


def all_linear(gated: bool) -> tuple[str, ...]:
    """Every projection of a model whose MLP has a gate or not."""
    return TARGETS if gated else tuple(name for name in TARGETS if name != "gate_proj")


@dataclass(frozen=True)
class Lora:
    """Adapters of PEFT's kind: A [rank, inputs], B [outputs, rank].

    Attributes:
        targets: projections that have one, in the order of ``EVERY_TARGET``.
        rslora: the scale is alpha / sqrt(rank) instead of alpha / rank.
        dropout: in training, of what A multiplies: each adapter drops other elements.
        dora: output channel i of an adapted matrix is m_i / |row i of W + scale B A| times that row; m is trained, and
            the norm counts as a constant in gradients, as in peft.
        residual: an adapted matrix W counts without its first ``rank`` singular values and vectors (``pissa``: Meng et
            al., 2024) or columns of its QR decomposition (``olora``), with which the adapters began; None: whole.
        base_dtype: in which the frozen projections are stored: ``int8`` with one scale per output channel, ``nf4`` in
            blocks of 64; None: in the run's.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False
    dropout: float = 0.0
    base_dtype: str | None = None
    dora: bool = False
    residual: str | None = None

    def __post_init__(self) -> None:
        if type(self.rank) is not int or not 1 <= self.rank <= MAX_RANK:
            raise UserError("out of range", field="rank", value=self.rank, accepted=f"1 to {MAX_RANK:,}")
        if isinstance(self.alpha, bool) or not LEAST_ALPHA <= self.alpha <= MOST_ALPHA:
            accepted = f"a number > 0, from {LEAST_ALPHA:g} to {MOST_ALPHA:g}"
            raise UserError("out of range", field="alpha", value=self.alpha, accepted=accepted)
        unknown = [name for name in self.targets if name not in EVERY_TARGET]
        if unknown or not self.targets:
            value = unknown[0] if unknown else "none"
            raise UserError("no such projection", field="targets", value=value, accepted=", ".join(EVERY_TARGET))
        check_rate(self.dropout, "dropout")
        if self.base_dtype not in (None, *BASE_DTYPES):
            accepted = ", ".join(BASE_DTYPES)
            raise UserError("no such dtype", field="base_dtype", value=self.base_dtype, accepted=accepted)
        if self.residual not in (None, *RESIDUALS):
            raise UserError("unknown value", field="residual", value=self.residual, accepted=", ".join(RESIDUALS))
        object.__setattr__(self, "targets", tuple(name for name in EVERY_TARGET if name in self.targets))

    def shape(self) -> dict[str, Any]:
        """What counts for memory and time, as JSON."""
        found: dict[str, Any] = {"rank": self.rank, "targets": self.targets}
        found |= {name: True for name in ("dropout", "dora") if getattr(self, name)}
        return found | ({"base_dtype": self.base_dtype} if self.base_dtype else {})

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
