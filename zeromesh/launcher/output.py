"""Destinations of the ranks' output: rank 0 keeps the terminal, torchrun's ``tee`` copies what the others write."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from zeromesh.comm.rank import OUTPUT

PREFIX = "[${rank}] "  # begins each line of a rank whose output is copied


class OutputStreams(DefaultLogsSpecs):
    """Log settings for torchrun's agent."""

    def __init__(self, folder: Path, variables: dict[str, str], forks: bool) -> None:
        super().__init__(log_dir=str(folder))  # of the files that the copied output passes through
        self._variables = variables  # torch has no other place for further variables of the ranks
        self._forks = forks

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the destinations for one start of the ranks, given their variables by local rank."""
        replaced = sys.stdout is not sys.__stdout__  # as in a notebook, where descriptor 1 is not what the user sees
        self._tee = {local: Std.ALL if replaced or int(env["RANK"]) else Std.NONE for local, env in envs.items()}
        for variables in envs.values():
            variables.update(self._variables)
        destination = super().reify(envs)
        if self._forks:
            # torch redirects the descriptors of ``sys.stdout``, which a notebook's stream may not have.
            for local in destination.tee_stdouts:
                envs[local][OUTPUT] = str(Path(destination.stdouts[local]).parent)
            destination.stdouts = destination.stderrs = dict.fromkeys(envs, "")
        return destination
