"""Cost of a model: operations, bytes and activations, traced without memory."""
