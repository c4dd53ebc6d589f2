"""What happens to activations between the forward and the backward."""
