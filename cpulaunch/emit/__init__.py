"""Files that start a plan without cpulaunch or on a cluster: shell, Slurm, Kubernetes; pure."""
