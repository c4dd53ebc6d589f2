"""Folder of a run, and the files in it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zeromesh.apps.train.data.prepare_text import TOKENIZER_FOLDER
from zeromesh.apps.train.train_settings import ResolvedTrainSettings
from zeromesh.base.files import read_text
from zeromesh.base.lock import FolderInUse, locked
from zeromesh.checkpoint.checkpoint_folder import has_checkpoints, latest
from zeromesh.checkpoint.copies.memory_files import marked
from zeromesh.checkpoint.weights.pretrained import is_model_id


class RunFolder:
    """Folder of a run, with the paths of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"  # resolved settings
        self.text = path / "text"  # token files
        self.tokenizer = self.text / TOKENIZER_FOLDER
        self.metrics = path / "metrics.jsonl"
        self.page = path / "report.html"
        self.times = path / "time.jsonl"  # by kind of work
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"  # weights, or adapters, at the end of the run
        self.report = path / "report.json"  # for programs; the same name with .md is for people

    @property
    def has_finished(self) -> bool:
        """True if the run has reached its end once."""
        return any(self.model.glob("*.safetensors"))

    def copy_tokenizer(self, target: Path) -> None:
        """Copy the tokenizer to a model; a run on tokens may have none."""
        if self.tokenizer.is_dir():
            shutil.copytree(self.tokenizer, target, dirs_exist_ok=True)

    @property
    def last_checkpoint(self) -> str | None:
        """Tag of the checkpoint from which the run is resumed; None if there is none."""
        # The file "latest" may name a checkpoint that was deleted, and only then is there a name without a checkpoint.
        return latest(self.checkpoints) if has_checkpoints(self.checkpoints) else None

    @property
    def is_copied(self) -> bool:
        """True if the run has copies in memory, of which some may be lost."""
        return marked(self.checkpoints) is not None

    def settings(self) -> ResolvedTrainSettings:
        """Return the settings of the run; raise ValueError if no run wrote the file."""
        try:
            return ResolvedTrainSettings.reread(json.loads(read_text(self.config)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(self.config)!r} is not what zeromesh train wrote: {error}") from None

    def require_base(self) -> None:
        """Raise ValueError if the model of transformers with which the run began is not there any more."""
        base = self.settings().huggingface
        if base is None or is_model_id(base.path) or Path(base.path).expanduser().is_dir():
            return
        raise ValueError(
            f"huggingface.path = {base.path!r} in {str(self.config)!r} is not a folder any more: the run began with "
            f"the model in {str(Path(base.path).expanduser().absolute())!r}; put it back there, or a link to where "
            "it is now (zeromesh sample and export also take its new place from that file)"
        )

    @contextmanager
    def held(self, resume: bool) -> Iterator[None]:
        """Lock the folder; raise ValueError if another run uses it, or has used it since ``check``."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except FolderInUse as error:
                raise ValueError(
                    f"run.output = {str(self.path)!r} is in use: {error.strerror}; wait for that run to end, or "
                    "choose another folder with --set run.output=FOLDER"
                ) from None
            self.check(resume)
            yield

    def check(self, resume: bool) -> None:
        """Raise ValueError if there is a run but ``resume`` is false, or none to resume, or no file can be written."""
        checkpoint = self.last_checkpoint
        if resume and checkpoint is None and not self.is_copied:
            remedy = "start the run without --resume, or name the folder of an earlier run"
            if self.has_finished:
                remedy = "choose another folder with --set run.output=FOLDER, and leave --resume out"
            raise ValueError(f"run.output = {str(self.path)!r} holds no checkpoint to resume from; {remedy}")
        if not resume and (checkpoint is not None or self.has_finished):
            going_on = "continue it with --resume, " if checkpoint is not None else ""
            raise ValueError(
                f"run.output = {str(self.path)!r} already holds a run; {going_on}choose another folder with "
                "--set run.output=FOLDER, or delete it"
            )
        try:
            for folder in (self.path, self.checkpoints):  # the second may be a link to another disk
                folder.mkdir(parents=True, exist_ok=True)
                # Permissions do not tell: a disk may be full, or mounted for reading only.
                with tempfile.TemporaryFile(dir=folder):
                    pass
        except OSError as error:
            raise ValueError(
                f"run.output = {str(self.path)!r} cannot be written to ({error.strerror}); choose another "
                "folder with --set run.output=FOLDER"
            ) from None
