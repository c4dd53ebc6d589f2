"""Applications over the engine: planner, verification, trainer, launcher and command line."""
