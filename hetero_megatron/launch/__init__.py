"""Starting a job on the hosts of a cluster: through ssh, SLURM or Kubernetes, or as lines to run by hand."""
