"""Embedding tables whose rows are spread over the ranks: lookups, sparse gradients, updates of the rows seen."""
