"""Start ranks: an agent on each node, MPI, and functions from within Python."""
