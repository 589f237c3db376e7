"""What a mixture-of-experts MLP is: how many experts, how tokens choose among them, and what all tokens share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hetero_megatron.errors import UserError

SCORES = ("softmax", "topk_softmax", "sigmoid")


@dataclass(frozen=True)
class MoE:
    """The MLP of layers whose kind is ``moe``. Tokens are never dropped.

    Args:
        num_experts: gated MLPs of ``ffn_hidden_size`` columns, of which each token uses ``top_k``.
        score: ``softmax`` over all experts, then the best; ``topk_softmax``: the best, then softmax over them;
            ``sigmoid`` of each.
        normalize: the weights of a token are divided by their sum; ``scale``: then multiplied by it.
        groups: of consecutive experts; a token chooses among those of the ``top_groups`` best, by the sum of the
            ``group_size`` best experts in each.
        score_bias: a bias per expert is added for the choice (not to the weights); it is no weight of the model, but
            moved after each step against the load (DeepSeek-V3).
        router_bias: the router adds a trained bias to its logits; bias: the experts' projections have biases.
        shared_ffn: columns of an MLP that all tokens use besides; 0: none. ``shared_gate``: its output is multiplied by
            the sigmoid of a projection of the token (Qwen2-MoE).
        weigh_inputs: a token's weights multiply what its experts get, not what they make of it (Llama 4; Megatron's
            ``--moe-apply-probs-on-input``).
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    score: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_size: int = 1
    score_bias: bool = False
    router_bias: bool = False
    bias: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    weigh_inputs: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "ffn_hidden_size", "groups", "top_groups", "group_size"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise _error(name, getattr(self, name), "must be a positive integer", "1 or more")
        if self.top_k > self.num_experts:
            raise _error("top_k", self.top_k, f"there are {self.num_experts} experts", f"1 to {self.num_experts}")
        if self.num_experts % self.groups:
            raise _error("groups", self.groups, f"does not divide {self.num_experts} experts", "a divisor")
        size = self.num_experts // self.groups
        if self.top_groups > self.groups or self.top_groups * size < self.top_k:
            problem = f"{self.groups} groups of {size} experts for top_k {self.top_k}"
            raise _error("top_groups", self.top_groups, problem, f"at most {self.groups}, with at least top_k experts")
        if self.group_size > size:
            raise _error("group_size", self.group_size, f"a group has {size} experts", f"1 to {size}")
        if self.score not in SCORES:
            raise _error("score", self.score, "unknown value", " | ".join(SCORES))
        if self.shared_gate and not self.shared_ffn:
            raise _error("shared_gate", True, "there is no shared expert", "false")

    def shape(self) -> dict[str, Any]:
        """As JSON; see ``ModelSpec.shape``."""
        return {key: value for key, value in asdict(self).items() if key != "weigh_inputs" or value}

    @property
    def router(self) -> tuple[Any, ...]:
        """Options of the operator ``router_topk``."""
        return self.top_k, self.score, self.normalize, self.scale, self.groups, self.top_groups, self.group_size


def _error(field: str, value: object, problem: str, accepted: str) -> UserError:
    return UserError(problem, field=field, value=value, accepted=accepted)
