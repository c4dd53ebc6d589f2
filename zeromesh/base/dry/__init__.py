"""Runs of models without memory, on the meta device."""
