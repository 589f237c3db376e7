"""Generating text under any plan: a key-value cache on every stage, tokens chosen on the last one."""

from hetero_megatron.generation.decoder import Decoder
from hetero_megatron.generation.sampling import Sampling
from hetero_megatron.generation.weights import SharedWeights, Weights, open_weights

__all__ = ["Decoder", "Sampling", "SharedWeights", "Weights", "open_weights"]
