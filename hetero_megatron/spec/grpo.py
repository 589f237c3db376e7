"""Group relative policy optimisation (GRPO, Shao et al. 2024): what is learned from the rewards of sampled answers, and
how much each of their tokens counts. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.errors import UserError

LOSS_TYPES = ("dapo", "grpo", "dr_grpo")
SCALES = ("group", "batch", "none")
# Of the ratio, as TRL calls them: means over the tokens of all answers.
TOKEN_FACTS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "kl")
FLAG_KEYS = {
    "group_size": "grpo_group_size", "iterations": "grpo_iterations", "eps_lower": "grpo_clamp_eps_lower",
    "eps_upper": "grpo_clamp_eps_upper", "beta": "grpo_kl_beta", "loss_type": "grpo_loss_type",
    "scale_rewards": "grpo_scale_rewards", "max_new_tokens": "max_new_tokens", "rows": "rollout_batch_size",
    "reward": "reward_function", "seconds": "reward_timeout", "sync_every": "generator_sync_every",
    "ahead": "generator_ahead",
}  # fmt: skip
_LEAST_DEVIATION = 1e-4  # TRL's: is added to a standard deviation before it divides


@dataclass(frozen=True)
class Grpo:
    """How answers are sampled, and the loss of their tokens.

    Attributes:
        group_size: answers to each prompt, which are compared with each other.
        iterations: optimizer steps on the same answers; from the second one on the ratio to the policy that sampled
            them is not 1.
        eps_lower, eps_upper: the ratio counts between 1 - eps_lower and 1 + eps_upper.
        beta: weight of the divergence from the reference; 0: there is none.
        weighs_kl: the divergence of a token counts times its ratio, so that its gradient is that of the divergence of
            the policy (TRL's ``use_bias_correction_kl``).
        loss_type: of TRL's ``loss_type``: ``dapo``: each token of the batch counts alike; ``grpo``: each answer does;
            ``dr_grpo``: each token does, over answers of the longest length.
        scale_rewards: of TRL's option: advantages are divided by the deviation of rewards in their ``group``, in the
            ``batch``, or not (``none``).
        max_new_tokens: most tokens of an answer.
        rows: answers that a pipeline samples at once.
        reward: FILE.py:NAME of the function that judges answers; seconds: how long a call of it may take.
        sync_every: of a generator on ranks of its own: steps after which it gets the weights again.
        ahead: it samples the next answers while the ranks that train learn from these.
    """

    group_size: int = 8
    iterations: int = 1
    eps_lower: float = 0.2
    eps_upper: float = 0.2
    beta: float = 0.0
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    max_new_tokens: int = 256
    rows: int = 32
    reward: str = ""
    seconds: float = 60.0
    sync_every: int = 1
    ahead: bool = False
    weighs_kl: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("loss_type", LOSS_TYPES), ("scale_rewards", SCALES)):
            if getattr(self, name) not in choices:
                accepted = ", ".join(choices)
                raise UserError("is not known", field=name, value=getattr(self, name), accepted=accepted)
        bounds = (
            ("group_size", self.group_size >= 2, "2 or more: answers are compared with each other"),
            ("iterations", self.iterations >= 1, "1 or more"),
            ("eps_lower", 0 <= self.eps_lower <= 1, "0 to 1"),
            ("eps_upper", 0 <= self.eps_upper < math.inf, "a number >= 0"),
            ("beta", 0 <= self.beta < math.inf, "a number >= 0"),
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("sync_every", self.sync_every >= 1, "1 or more"),
        )
        for name, is_valid, accepted in bounds:
            if not is_valid:
                raise UserError("cannot be used", field=name, value=getattr(self, name), accepted=accepted)

    @property
    def may_be_stale(self) -> bool:
        """Whether weights may have changed between sampling and the first step on the answers."""
        return self.ahead or self.sync_every > 1

    @property
    def facts(self) -> tuple[str, ...]:
        """What is added up over tokens beside the loss."""
        return TOKEN_FACTS if self.beta else TOKEN_FACTS[:-1]

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """By how much each answer is better than the mean of its group; ``rewards``: group after group; NaN: the answer
        was not judged, so that it is in no mean, and neither better nor worse."""
        in_batch, advantages = _deviation(rewards), list[float]()
        for group in self._groups(rewards):
            mean = statistics.fmean(_judged(group) or [0.0])
            deviation = _deviation(group) if self.scale_rewards == "group" else in_batch
            scale = 1.0 if self.scale_rewards == "none" else deviation + _LEAST_DEVIATION
            advantages += [0.0 if math.isnan(reward) else (reward - mean) / scale for reward in group]
        return advantages

    def weights(self, lengths: Sequence[int]) -> list[float]:
        """Of the tokens of each answer, with which their mean over all answers is the loss; ``lengths``: in tokens."""
        if self.loss_type == "dapo":
            return [1.0] * len(lengths)
        of_answer = sum(lengths) / len(lengths)
        if self.loss_type == "dr_grpo":
            return [of_answer / self.max_new_tokens] * len(lengths)
        return [of_answer / length for length in lengths]

    def summary(self, rewards: Sequence[float], lengths: Sequence[int], cut: Sequence[bool]) -> Mapping[str, float]:
        """Of the answers of a batch, some of which were judged, as TRL calls it; ``cut``: the answer has no end."""
        return {
            "reward": statistics.fmean(_judged(rewards)), "reward_std": _deviation(rewards),
            "frac_reward_zero_std": statistics.fmean(_deviation(group) < 1e-8 for group in self._groups(rewards)),
            "completions/mean_length": statistics.fmean(lengths), "completions/clipped_ratio": statistics.fmean(cut),
        }  # fmt: skip

    def _groups(self, rewards: Sequence[float]) -> list[Sequence[float]]:
        return [rewards[i : i + self.group_size] for i in range(0, len(rewards), self.group_size)]


def _judged(rewards: Sequence[float]) -> list[float]:
    return [reward for reward in rewards if not math.isnan(reward)]


def _deviation(rewards: Sequence[float]) -> float:
    """Of those that were judged; 0 where there is nothing to compare."""
    judged = _judged(rewards)
    return statistics.stdev(judged) if len(judged) > 1 else 0.0
