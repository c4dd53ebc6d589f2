"""Tiers of memory: the device, host memory, files."""
