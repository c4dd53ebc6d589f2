"""Predictions for a layout: memory of each rank, and the time of a step."""
