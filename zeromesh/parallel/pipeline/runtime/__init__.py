"""Stages of a model, and the interpreter that runs a schedule on them."""
