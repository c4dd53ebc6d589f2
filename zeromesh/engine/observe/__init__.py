"""Observation of a run: values, progress, pictures, time, operations, and the machine."""
