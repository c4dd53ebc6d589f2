"""Updates of optimizers, sums and checksums on the host, in one pass over memory."""
