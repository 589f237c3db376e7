"""Hetero-Megatron plugin: the ranks of one MPI world as an island with a communication library of its own."""

BACKEND = "mpi_island"  # of torch.distributed; here, as plugin and process group both need it
