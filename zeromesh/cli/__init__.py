"""The user's commands."""
