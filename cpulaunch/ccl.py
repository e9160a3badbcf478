"""`import cpulaunch.ccl`: torch.distributed has the backend "ccl" (oneCCL), also without a launch."""

from cpulaunch.worker.ccl.registration import register

register()
