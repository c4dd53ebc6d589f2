"""ZeroMesh: train PyTorch models that do not fit, or are too slow, on one device."""
