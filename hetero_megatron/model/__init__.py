"""The GPT family: one plain definition, parallelism applied from outside."""

from hetero_megatron.model.gpt import Chunk, GPTStage
from hetero_megatron.model.init import initial_values

__all__ = ["Chunk", "GPTStage", "initial_values"]
