"""What changes the parameters: optimizers over pieces of them, parameter groups, learning-rate schedules."""
