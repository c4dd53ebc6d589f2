"""What of a run goes into a checkpoint, and how it comes back."""
