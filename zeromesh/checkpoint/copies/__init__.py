"""Copies of checkpoints in the memory of other nodes, and writing in the background."""
