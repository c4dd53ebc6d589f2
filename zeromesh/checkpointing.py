"""Activation checkpointing under the name that DeepSpeed's users know: ``zeromesh.checkpointing.checkpoint``."""

from zeromesh.parallel.activation.checkpoint import checkpoint

__all__ = ["checkpoint"]
