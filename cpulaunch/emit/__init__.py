"""Plans as files for other launchers: shell, Slurm, Kubernetes; pure."""
