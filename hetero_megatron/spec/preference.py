"""Losses of preference pairs, of each an answer that was chosen and one that was rejected. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetero_megatron.errors import UserError

# Name -> whether log-probabilities are those per token of an answer, whatever is asked; None: as asked.
LOSSES: dict[str, bool | None] = {
    "dpo": None, "ipo": True, "hinge": None, "robust": None, "exo_pair": None, "nca_pair": None, "sppo_hard": None,
    "apo_zero": None, "apo_down": None, "orpo": True, "simpo": True, "cpo": None, "kto": False,
    "apo_zero_unpaired": False,
}  # fmt: skip
UNPAIRED = ("kto", "apo_zero_unpaired")  # of single answers that are labelled as desired or not
WITHOUT_REFERENCE = ("orpo", "simpo", "cpo")
SMOOTHED = ("dpo", "robust", "exo_pair", "cpo")  # that have a label smoothing
# As TRL calls them; means over pairs.
REWARDS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
)  # fmt: skip
# The same of labelled answers: what ranks add up, over all answers of a batch.
LABELLED = (
    "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "share/chosen", "kl",
)  # fmt: skip


def shown_means(means: Mapping[str, float]) -> Mapping[str, float]:
    """Means over steps or batches as TRL shows them: those of ``LABELLED``, which are over all answers, over those that
    are desired, or not; 0 of none. Others as they are."""
    if not set(LABELLED) <= means.keys():
        return means
    share = {"chosen": means["share/chosen"], "rejected": 1 - means["share/chosen"]}
    split = {}
    for name in LABELLED[:4]:
        label_share = share[name.split("/")[1]]
        split[name] = means[name] / label_share if label_share > 0 else 0.0
    return split | {"rewards/margins": split["rewards/chosen"] - split["rewards/rejected"], "kl": means["kl"]}


@dataclass(frozen=True)
class Preference:
    """The loss of a pair, or of a labelled answer, and how it is computed.

    Attributes:
        loss: a key of ``LOSSES``.
        beta: how much log-probabilities count; of ``orpo`` the weight of the odds ratio.
        smoothing: probability that a pair is labelled the wrong way round.
        per_token: log-probabilities of an answer are divided by its tokens.
        sft_weight: of the chosen answer's loss per token, which is added.
        gamma: of ``simpo``: the margin.
        in_step: the reference is the frozen base, computed in each step beside the model with adapters; False: its
            log-probabilities are there before the first step.
        desirable, undesirable: weights of the losses of labelled answers.
    """

    loss: str = "dpo"
    beta: float = 0.1
    smoothing: float = 0.0
    per_token: bool = False
    sft_weight: float = 0.0
    gamma: float = 0.5
    in_step: bool = False
    desirable: float = 1.0
    undesirable: float = 1.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise UserError("no such loss", field="loss", value=self.loss, accepted=", ".join(LOSSES))
        for name in ("beta", "gamma", "sft_weight", "desirable", "undesirable"):
            number = getattr(self, name)
            if not math.isfinite(number) or number < 0 or (name == "beta" and not number):
                accepted = "a number > 0" if name == "beta" else "a number >= 0"
                raise UserError("cannot be used", field=name, value=number, accepted=accepted)
        limit = 0.5 if self.loss in ("robust", "exo_pair") else 1.0
        if not 0 <= self.smoothing < limit:
            raise UserError(
                "is no probability of a wrong label", field="smoothing", value=self.smoothing,
                accepted=f"0 <= rate < {limit:g}",
            )  # fmt: skip
        if self.smoothing and self.loss not in SMOOTHED:
            raise UserError(
                f"the loss {self.loss} has none", field="smoothing", value=self.smoothing,
                accepted=f"0, or one of {', '.join(SMOOTHED)}",
            )  # fmt: skip
        for name in ("per_token", "sft_weight") if self.unpaired else ():
            if getattr(self, name):
                raise UserError(
                    f"the loss {self.loss} has none", field=name, value=getattr(self, name), accepted="a loss of pairs"
                )
        if self.loss == "exo_pair" and not self.smoothing:
            raise UserError("exo_pair needs one", field="smoothing", value=0, accepted="e.g. 1e-3")

    @property
    def refers(self) -> bool:
        """Whether there is a reference model."""
        return self.loss not in WITHOUT_REFERENCE

    @property
    def unpaired(self) -> bool:
        """Whether it is one of labelled answers, not of pairs."""
        return self.loss in UNPAIRED

    @property
    def estimates_kl(self) -> bool:
        """Whether each step first estimates how far the model is from the reference."""
        return self.loss == "kto"

    @property
    def forwards(self) -> int:
        """How many forwards come before each step: the reference's, and KTO's over prompts with others' answers, by
        the model and by a reference that is computed in each step."""
        return (1 + self.estimates_kl) * (self.refers and self.in_step) + self.estimates_kl

    @property
    def facts(self) -> tuple[str, ...]:
        """What is added up over the answers or pairs of a batch beside the loss."""
        return LABELLED if self.unpaired else REWARDS

    @property
    def stored(self) -> bool:
        """Whether there is a reference that is computed before the first step."""
        return self.refers and not self.in_step

    @property
    def averages(self) -> bool:
        """Whether log-probabilities are those per token."""
        fixed = LOSSES[self.loss]
        return self.per_token if fixed is None else fixed
