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
        num_experts: MLPs of ``ffn_hidden_size`` columns, gated or not as the model's, of which each token uses
            ``top_k``.
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


@dataclass(frozen=True)
class Balancing:
    """What is added to the loss of the next token, for every mixture-of-experts layer, and what moves the bias.

    Of a sequence of T tokens (a row of the batch, however many documents are packed in it) with E experts of which each
    token uses k, the sequence loss is ``E / (k T^2) sum_i c_i P_i``: c_i tokens have expert i among their k best scores
    (without bias and groups), P_i sums the scores of expert i, those of a token normalised to 1. It is 1 where all are
    equal. Megatron's and DeepSeek-V3's definition.

    Args:
        sequence_loss: coefficient of the mean over sequences, each weighted by its tokens that count in the loss.
        z_loss: coefficient of the mean of logsumexp(router logits)^2 over the tokens that count in the loss (ST-MoE).
        bias_rate: after a step the bias of every expert that fewer (more) tokens of the step chose than the mean grows
            (falls) by this (DeepSeek-V3's balancing without a loss); 0: it stays.
    """

    sequence_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def describe(self, moe: MoE) -> str:
        """What training minimises besides the loss that is printed, and what else balances."""
        parts = [f"{self.sequence_loss:g} x the sequence loss of each layer"] if self.sequence_loss else []
        parts += [f"{self.z_loss:g} x the z-loss of each layer"] if self.z_loss else []
        text = f"experts: the gradient also has {' and '.join(parts)}; " if parts else "experts: "
        text += "the loss that is printed is that of the next token alone"
        if self.bias_rate:
            return f"{text}; the router's bias moves by {self.bias_rate:g} per step"
        if moe.score_bias:
            return f"{text}; the router's bias stays as it is (--moe-router-enable-expert-bias moves it)"
        return text if parts else f"{text}; nothing balances their load"


UNBALANCED = Balancing()
