"""The GPT family: one plain definition, parallelism applied from outside."""

from hetero_megatron.model.gpt import GPTStage, StagePart
from hetero_megatron.model.initial_values import initial_values

__all__ = ["StagePart", "GPTStage", "initial_values"]
