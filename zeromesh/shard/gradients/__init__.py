"""Gradients of units: from autograd to the reduced piece that the optimizer takes."""
