"""What the process environment says of a rank: torchrun, SLURM, MPI and other launchers."""
