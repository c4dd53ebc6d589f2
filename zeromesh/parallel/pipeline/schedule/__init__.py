"""Schedules as data: which rank does what in which order. No module here imports torch."""
