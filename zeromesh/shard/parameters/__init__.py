"""Parameters of units: where they are, when they are gathered, and when they leave."""
