"""Activations between the forward and the backward: recomputation, and storage on the host."""
