"""The variables of Slurm, MPI and PBS, read as settings: which host or rank of a job this process is."""
