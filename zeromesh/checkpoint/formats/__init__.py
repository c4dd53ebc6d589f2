"""Checkpoints of other libraries: a reader and a writer of each format, over one intermediate form."""
