"""The drawings of the documentation."""
