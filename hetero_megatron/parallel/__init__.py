"""Tensor and sequence parallelism, gradient synchronisation, sharded optimizer: applied from outside the model."""
