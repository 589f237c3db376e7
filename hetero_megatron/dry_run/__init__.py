"""One rank of a plan run on fake tensors: shapes, bytes and peak memory without the cluster."""
