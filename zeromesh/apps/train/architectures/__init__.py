"""Models that a training run can be configured with."""
