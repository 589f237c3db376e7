"""What multi-head latent attention is (DeepSeek-V2 and V3): keys and values come from one latent vector per token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.rope import yarn_growth


@dataclass(frozen=True)
class MLA:
    """The sizes of multi-head latent attention.

    A token's latent has ``kv_rank`` features, which every head projects up to ``nope_dim`` features of its key and
    ``v_dim`` of its value; further ``rope_dim`` features of the key turn with the position and are the same for all
    heads. Queries come from the token, or from a latent of ``q_rank`` features. The latents are normalised.

    Attention is computed over heads of ``head_dim`` features: queries, keys and values are filled with zeros up to it.

    Args:
        q_rank: None: queries come straight from the token.
        bias: of the projections down to the latents.
        norm_eps: of the latents' norms.
        mscale_all_dim: of YaRN; what it adds to the scale of the scores is in ``ModelSpec.attn_scale``.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None
    bias: bool = False
    norm_eps: float = 1e-6
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim", "q_rank"):
            value = getattr(self, name)
            if not (name == "q_rank" and value is None) and (type(value) is not int or value < 1):
                raise UserError("must be a positive integer", field=name, value=value, accepted="1 or more")

    def shape(self) -> dict[str, Any]:
        """As JSON; see ``ModelSpec.shape``."""
        return asdict(self)

    @property
    def qk_dim(self) -> int:
        """Features of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Features of a head as the attention operator sees it."""
        return max(self.qk_dim, self.v_dim)

    @property
    def latents(self) -> int:
        """Features of a token that no tensor parallelism cuts: what the projections down give."""
        return (self.q_rank or 0) + self.kv_rank + self.rope_dim


def score_scale(mla: MLA, factor: float) -> float | None:
    """Of the scores, where YaRN, which stretches positions by ``factor``, changes it."""
    if not mla.mscale_all_dim or factor <= 1:
        return None
    return mla.qk_dim**-0.5 * yarn_growth(factor, mla.mscale_all_dim) ** 2
