"""The bottom layer: tables, policies and protocols. No input or output, no communication."""
