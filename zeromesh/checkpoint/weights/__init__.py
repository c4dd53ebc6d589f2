"""Weights of whole models: read, written, converted and quantized."""
