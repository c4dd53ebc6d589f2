"""Following of split activations through code that nobody knows, and the checks that it is right."""
