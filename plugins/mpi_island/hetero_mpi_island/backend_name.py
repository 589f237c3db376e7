"""The name of the backend, importable where mpi4py is missing."""

BACKEND = "mpi_island"
