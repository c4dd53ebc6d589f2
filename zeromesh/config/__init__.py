"""Frozen settings from a JSON file in DeepSpeed's format: the only package that knows the names of keys."""
