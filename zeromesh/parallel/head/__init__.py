"""Heads of language models whose logits are never all there."""
