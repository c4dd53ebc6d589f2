"""What a run shows of itself: values, progress, pictures, time, operations, and the machine it runs on."""
