"""The folder of a run: what lies where in it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from zeromesh.checkpoint.boxes import latest


@dataclass(frozen=True)
class RunFolder:
    """Everything that a run writes lies in ``path``."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.json"

    @property
    def text(self) -> Path:
        """A folder with the tokenizer and the token files."""
        return self.path / "text"

    @property
    def metrics(self) -> Path:
        """One JSON record per line."""
        return self.path / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        """The loss over the steps."""
        return self.path / "loss.png"

    @property
    def checkpoints(self) -> Path:
        """A folder with what a resumed run needs."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The weights at the end of the run."""
        return self.path / "model.safetensors"

    @property
    def report(self) -> Path:
        """The closing report for programs; beside it, in Markdown, for people."""
        return self.path / "report.json"

    def check(self, resume: bool) -> None:
        """Refuse a folder in which the run cannot start.

        Raises:
            ValueError: if it holds a run and is not to be resumed, or holds none and is, or cannot be written to.
        """
        if resume and (not self.checkpoints.is_dir() or latest(self.checkpoints) is None):
            raise ValueError(
                f"run.output = {str(self.path)!r} holds no checkpoint to resume from; "
                "start the run without --resume, or name the folder of an earlier run"
            )
        if not resume and (self.metrics.exists() or self.checkpoints.exists()):
            raise ValueError(
                f"run.output = {str(self.path)!r} already holds a run; continue it with --resume, "
                "choose another folder with --set run.output=FOLDER, or delete it"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(
                f"run.output = {str(self.path)!r} cannot be written to ({error.strerror}); "
                "choose another folder with --set run.output=FOLDER"
            ) from None
