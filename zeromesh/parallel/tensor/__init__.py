"""Layers split over ranks: operators, layers, plans, and the loss of a split vocabulary."""
