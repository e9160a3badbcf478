"""GPUs, from sysfs and, where it is installed, from NVML."""
