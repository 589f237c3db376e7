"""One gradient bucket's way: memory (flat_memory), owners (routes), exchange, reduction, order (gradients)."""
