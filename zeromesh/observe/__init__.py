"""What a run shows of itself: metrics, progress, pictures, and the machine it runs on."""
