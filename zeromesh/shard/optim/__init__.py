"""Optimizers over pieces of parameters, parameter groups, learning-rate schedules."""
