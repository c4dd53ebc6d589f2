"""Parallelism of experts."""
