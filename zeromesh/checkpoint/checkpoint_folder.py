"""Folders of checkpoints: a checkpoint appears whole or not at all; the latest is named, and old ones are deleted."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from zeromesh.base.files import DRAFT as DRAFT
from zeromesh.base.files import inside, is_inside, read_text, write_text
from zeromesh.base.lock import FolderInUse, locked
from zeromesh.checkpoint.manifest import MANIFEST, read_manifest
from zeromesh.checkpoint.rank_manifests import require_all_files, write_index

_log = logging.getLogger(__name__)

# A checkpoint is written to a folder of another name (.draft), flushed to the disk, and renamed
# last. An earlier one that it replaces has the name with .old for a moment.
LATEST = "latest"
# Ends of folder names that are not checkpoints: being written, being replaced, being deleted.
OLD = ".old"
GONE = f".gone{DRAFT}"


def is_readable(folder: Path) -> bool:
    """Return whether it is a checkpoint with a manifest as it was written."""
    try:
        return bool(read_manifest(folder))
    except (OSError, ValueError):
        return False


def _is_whole(folder: Path) -> bool:
    """Return whether all its files are there, too, and none is cut off."""
    # No hash is compared, which would take long.
    try:
        require_all_files(folder, read_manifest(folder))
    except (OSError, ValueError, LookupError, TypeError):  # manifests of format 1 have no hash, and may hold anything
        return False
    return True


@contextmanager
def another_offered(folder: Path) -> Iterator[None]:
    """Let errors about a checkpoint in this context end with the remedy."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        newest = _newest(folder.parent, besides=folder)
        remedy = f"{folder.parent} has no other checkpoint that is whole"
        if newest is not None:
            remedy = (
                f"the newest other one is {newest!r}: load it with tag={newest!r}, or write that into "
                f"{folder.parent / LATEST}; no file of it is cut off, and `zeromesh inspect --verify` compares its "
                "hashes"
            )
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{error}; {remedy}") from error.__cause__


def write_latest(folder: Path, tag: str) -> None:
    """Let ``folder/latest`` name a checkpoint."""
    write_text(folder / LATEST, tag)
    _flush(folder)


class Draft:
    """A checkpoint that is being written to a folder of checkpoints; it gets its name when it is whole."""

    def __init__(self, folder: Path, tag: str) -> None:
        self._folder, self._tag = folder, tag
        self.path, self.final = folder / f"{tag}{DRAFT}", folder / tag

    def hold(self, resources: ExitStack) -> None:
        """Lock the folder of checkpoints; raise FolderInUse if another run saves there."""
        try:
            resources.enter_context(locked(self._folder))
        except FolderInUse as error:
            raise FolderInUse(error.errno, f"{error.strerror}; let each run save to a folder of its own") from None
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def begin(self, needed: int) -> None:
        """Make the empty folder that ``needed`` bytes are written to; raise OSError without the space."""
        try:
            # An earlier attempt may have left something in it.
            remove(self.path)
            self.path.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"a checkpoint needs {needed:,} bytes in {self._folder}, where {free:,} are free; make room, set "
                "checkpoint.keep_last, or save to another folder",
            )

    def finish(self, state: dict[str, Any], ranks: int, is_latest: bool = True, most: int | None = None) -> None:
        """Write the manifest of all ``ranks``, and give the checkpoint its name; an earlier one of it goes away.

        Afterwards, so that at no time there are fewer, all but the last ``most`` of the latest go away, too.
        """
        write_index(self.path, state, ranks)
        commit(self.path, self.final)
        if is_latest:
            write_latest(self._folder, self._tag)
            if most is not None:
                keep_last(self._folder, self._tag, most)

    def discard(self) -> None:
        """Delete what was written."""
        remove(self.path)


def _unwritable(folder: Path, error: OSError) -> OSError:
    advice = "save to a folder that can be written to"
    return OSError(error.errno, f"cannot write a checkpoint to {folder} ({error.strerror}); {advice}")


def commit(draft: Path, final: Path) -> None:
    """Give a written folder its name; one that had the name before goes away."""
    old = final.with_name(final.name + OLD)
    # Names inside of the folder reach the disk before the folder gets its own.
    _flush(draft)
    if (final / MANIFEST).is_file():
        remove(old)  # of a process that died between the two renames, or before it could remove it
        final.rename(old)
    else:
        remove(final)  # it was half deleted; the old one stays until the new one is there
    draft.rename(final)
    _flush(final.parent)
    remove(old)


def require_free(final: Path) -> None:
    """Raise FileExistsError if a checkpoint would take the place of what is none."""
    for folder in (final, final.with_name(final.name + OLD), final.with_name(final.name + DRAFT)):
        # Nothing of a user's is deleted; what a save of ours has left may be.
        looked_at = folder.is_dir() and not is_readable(folder)
        strange = [path.name for path in folder.iterdir() if not _is_ours(path)] if looked_at else []
        if folder.is_file() or strange:
            reason = f"holds {', '.join(sorted(strange)[:3])}, and" if strange else "is a file, and"
            raise FileExistsError(f"{folder} {reason} is not overwritten by a checkpoint; choose another tag or folder")


def _is_ours(path: Path) -> bool:
    final = Path(path.name.removesuffix(DRAFT))  # a process may end before it has given a file its name
    named = final.name.startswith("rank_") and final.suffix in (".safetensors", ".jsonl", ".json")
    return path.is_file() and (named or final.name.startswith(MANIFEST))


def _is_swept(path: Path, series: str) -> bool:
    """Return whether a folder is a draft or an old or half deleted checkpoint, and holds nothing else."""
    tag = path.name.removesuffix(GONE).removesuffix(DRAFT).removesuffix(OLD)
    in_series = tag.rstrip("0123456789") == series != tag
    if not (in_series and path.is_dir() and (is_left(path) or not (path / MANIFEST).is_file())):
        return False
    files = [*path.iterdir()]
    return (bool(files) or is_left(path)) and all(map(_is_ours, files))


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder; nothing if there is none. Of a link, only itself."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        if not folder.name.endswith((DRAFT, OLD)):  # so that no kill leaves an empty folder with a checkpoint's name
            gone = folder.with_name(folder.name + GONE)
            remove(gone)
            folder = folder.rename(gone)
        (folder / MANIFEST).unlink(missing_ok=True)  # first: what is half deleted is not a checkpoint
        shutil.rmtree(folder)


def _flush(path: Path) -> None:
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_tag(tag: str) -> None:
    """Raise ValueError for what names no folder in a folder of checkpoints, or is needed there for other things."""
    if Path(tag).name != tag or not is_inside(Path(), tag):
        raise ValueError(f"a checkpoint cannot have the tag {tag!r}: it names a folder, without a path; choose another")
    if tag == LATEST or tag.endswith((DRAFT, OLD)):
        raise ValueError(
            f"a checkpoint cannot have the tag {tag!r}: {LATEST!r} and names that end in {DRAFT!r} or {OLD!r} are for "
            "files of the folder itself; choose another tag"
        )


def locate(folder: Path, tag: str) -> Path:
    """Return the folder of a checkpoint. It has another name if a process died while it was replaced.

    Raises:
        ValueError: the tag leads out of the folder.
    """
    path = inside(folder, tag, "the checkpoint")
    old = path.with_name(path.name + OLD)
    return old if not (path / MANIFEST).is_file() and (old / MANIFEST).is_file() else path


def is_left(path: Path) -> bool:
    """Return whether a folder is left by a save that was interrupted or is under way, and is not a checkpoint."""
    tag = path.name.removesuffix(OLD)
    return path.name.endswith(DRAFT) or (tag != path.name and locate(path.parent, tag) != path)


def latest(folder: Path) -> str | None:
    """Return the tag that ``folder/latest`` names; None if there is no checkpoint."""
    path = folder / LATEST
    if not path.is_file():
        newest = _newest(folder) if folder.is_dir() else None
        if newest is not None:
            _log.warning("%s has no file %r; the newest complete checkpoint is taken: %r", folder, LATEST, newest)
        return newest
    tag = read_text(path, errors="replace").strip()
    if is_inside(folder, tag) and is_readable(locate(folder, tag)):
        return tag
    # A kill may leave the file empty, or with the name of what was not written to its end.
    newest = _newest(folder)
    if newest is None:
        return tag or None
    problem = f"names {tag!r}, which is not a complete checkpoint" if tag else "is empty"
    _log.warning("%s %s; the newest complete checkpoint is taken instead: %r", path, problem, newest)
    return newest


def _newest(folder: Path, besides: Path | None = None) -> str | None:
    others = (tag for tag in reversed(tags_by_step(folder)) if locate(folder, tag) != besides)
    return next((tag for tag in others if _is_whole(locate(folder, tag))), None)


def has_checkpoints(folder: Path) -> bool:
    """Return whether there is a manifest, perhaps a damaged one."""
    return next(folder.glob(f"*/{MANIFEST}"), None) is not None


def tags_by_step(folder: Path) -> dict[str, int]:
    """Return the steps of the checkpoints with a manifest as it was written, by tag, in their order."""
    places: list[tuple[tuple[int, int, int, str], str]] = []
    for path in [manifest.parent for manifest in folder.glob(f"*/{MANIFEST}")]:
        if not is_left(path):
            with suppress(OSError, ValueError):  # one that is damaged, or deleted or replaced in this moment
                places.append((order(path, step_of(read_manifest(path))), path.name.removesuffix(OLD)))
    return {tag: place[0] for place, tag in sorted(places)}


def step_of(manifest: dict[str, Any]) -> int:
    """Return the updates of the run that wrote a checkpoint; -1 where it does not say so."""
    return int(manifest.get("global_steps", -1))


def order(path: Path, step: int) -> tuple[int, int, int, str]:
    """Return what checkpoints are sorted by, the newest last: the step, and for equal ones the number in the tag."""
    # The times of files count last: a clock may go back, and copies have others.
    tag = path.name.removesuffix(OLD)
    digits = tag[len(tag.rstrip("0123456789")) :]
    written = path / MANIFEST
    return step, int(digits[-18:] or -1), (written if written.exists() else path).stat().st_mtime_ns, tag


def keep_last(folder: Path, tag: str, count: int) -> None:
    """Delete all but the last ``count`` checkpoints of the series of ``tag``, which differ in a last number only.

    Those of later steps than that of ``tag``, which a run that went back has left, stay.
    """
    # A tag without a number was chosen by hand, and belongs to no series.
    series = tag.rstrip("0123456789")
    if series == tag:
        return
    try:
        # What saves and deletions that were cut off have left goes away, too.
        for path in [path for path in folder.iterdir() if _is_swept(path, series)]:
            remove(path)  # first, or the old one of a checkpoint that is deleted would become the checkpoint
        # Never the one that was just written, nor the one that ``latest`` names.
        protected = {tag, read_text(folder / LATEST).strip()}
        steps = tags_by_step(folder)
        others = [other for other in steps if other.rstrip("0123456789") == series != other]
        earlier = [other for other in others if steps[other] <= steps.get(tag, -1)]
        for other in reversed([other for other in earlier if _is_whole(locate(folder, other))][:-count]):
            if other not in protected:
                remove(locate(folder, other))
    except (OSError, ValueError) as error:  # no error: what was to be saved is saved
        _log.warning("could not remove old checkpoints from %s: %s", folder, error)
