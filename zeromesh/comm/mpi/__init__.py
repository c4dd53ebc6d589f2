"""MPI as a backend of torch.distributed."""
