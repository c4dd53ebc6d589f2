"""Comparison of a layout's training with that of one plain process, on the user's own model."""
