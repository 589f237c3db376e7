"""Tensor and sequence parallelism, gradient synchronisation and the sharded optimizer, applied from outside the model."""
