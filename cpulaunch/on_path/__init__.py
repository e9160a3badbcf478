"""A folder for PYTHONPATH that makes cpulaunch and its plugin known to a Python in which they are not installed.

It has no other package: the folder that cpulaunch is installed in would hide packages of the worker's own environment.
"""
