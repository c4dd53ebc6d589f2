"""Checkpoints as logical boxes of named tensors, in safetensors files with a JSON manifest."""
