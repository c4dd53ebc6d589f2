"""Splits of a model's computation over ranks: layers, sequences, stages and activations."""
