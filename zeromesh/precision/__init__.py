"""Loss scaling for fp16."""
