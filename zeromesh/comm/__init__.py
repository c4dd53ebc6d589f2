"""The processes of a run: environment, process group, mesh and collectives."""
