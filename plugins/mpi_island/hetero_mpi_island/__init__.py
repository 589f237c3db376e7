"""Hetero-Megatron plugin: the ranks of one MPI world as an island with a communication library of its own."""
