"""Checkpoints: named boxes of tensors in safetensors files with a JSON manifest, and the contents of a run."""
