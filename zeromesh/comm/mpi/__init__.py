"""MPI below the engine's collectives."""
