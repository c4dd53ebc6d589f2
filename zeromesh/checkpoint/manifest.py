"""Manifests: the description of a checkpoint, and the check that its files are there and not cut off."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from zeromesh.config.errors import some
from zeromesh.model.files import LARGEST_RECORD, inside, is_inside, open_regular, read_text

# Format of manifests that are written; format 1 is read, too. It rises when a version of this code that reads the
# present one would read a new manifest wrongly. A new key that may be missing does not raise it.
FORMAT = 2

MANIFEST = "manifest.json"

ANOTHER = "choose another checkpoint"

_STRUCTURE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError, AssertionError,
)  # fmt: skip
"""Errors in which reading what somebody else has written ends where it is not of the form that is expected."""

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""


def _dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return name


def _scalar(value: Any) -> Any:
    """Return a state that is one number, or a tensor of one as its value and its dtype."""
    if isinstance(value, list):
        number, name = value
        if type(number) not in (bool, int, float):
            raise ValueError(f"{number!r} is no number")
        torch.tensor(number, dtype=getattr(torch, _dtype(name)))  # raises for a number that the dtype does not have
    return value


def _numbers(states: dict[str, Any]) -> dict[str, Any]:
    for key, value in states.items():
        try:
            single = _scalar(value)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{key} = {str(value)[:80]}, which is no number and its dtype ({error})") from None
        step = single[0] if isinstance(single, list) else single
        if key == "step" and not (isinstance(step, int | float) and 0 <= step < 2**53):
            raise ValueError(f"step = {str(step)[:80]}, which is no number of updates")
    return states


Count = Annotated[int, Field(ge=0, lt=2**53)]
Dtype = Annotated[str, AfterValidator(_dtype)]


class _Placement(TypedDict):
    parameter: str
    gradient: str
    optimizer: str


class _Parameter(TypedDict):
    dtype: Dtype
    trainable: bool


class _Data(TypedDict):
    number: Count
    samples: Count
    length: Count
    seed: int | None


class _Scale(TypedDict):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    hysteresis: Count
    good_steps: Count


_Spikes = TypedDict(
    "_Spikes",
    {"loss": list[float], "gradient norm": list[float], "in a row": Annotated[list[Count], Field(max_length=1)]},
    total=False,
)


class _Manifest(TypedDict, total=False):
    zeromesh: str
    imported: str
    written: str
    frozen_left_out: bool
    world_size: Count
    mesh: dict[str, Count]
    placement: _Placement
    train_batch_size: Count
    global_steps: Count
    global_samples: Count
    micro_steps: Count
    skipped_steps: Count
    spikes: _Spikes
    data: _Data | None
    loss_scaler: _Scale | None
    scheduler: dict[str, Any] | None
    scheduler_type: str | None
    optimizer: str | list[str]
    groups: list[dict[str, Any]]
    members: dict[str, Count]
    scalars: dict[str, Annotated[dict[str, Any], AfterValidator(_numbers)]]
    client_state: dict[str, Any]
    model: dict[str, Any]
    tied: dict[str, str]
    parameters: dict[str, _Parameter]


_FORM = TypeAdapter(_Manifest)

_OF_A_RUN = (
    "global_steps", "micro_steps", "skipped_steps", "loss_scaler", "scheduler", "optimizer", "groups", "scalars",
    "client_state",
)  # fmt: skip
"""Entries that every run and every conversion has written, and a loaded run needs."""


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Let errors about the form of what is read in this context be ValueError, with the remedy."""
    try:
        yield
    except OSError:
        raise
    except _STRUCTURE as error:
        # Ours name the file or tell the remedy; Python's own do neither.
        if isinstance(error, ValueError) and ("; " in str(error) or str(path) in str(error)):
            raise
        what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no more is known')[:200]}"
        raise ValueError(f"{path} is not of the form that is written there ({what}); {ANOTHER}") from error


def require_form(form: TypeAdapter[Any], values: Any, path: Path) -> None:
    """Raise ValueError, with the first value that is wrong, unless values are of a form."""
    try:
        form.validate_python(values, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place, rule = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        value = f"{str(first['input'])[:80]!r}"
        raise ValueError(f"{path} is not of the form that is written: {place} is {value} ({rule}); {ANOTHER}") from None


def signed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a manifest, with its format and a hash of itself."""
    content = {"format": FORMAT, **content}
    return {**content, "sha256": hash_of(content)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint in the newest format; raise if there is none, or it was changed.

    Its entries are of the form that is written: the hash says that it was not changed since, and not who wrote it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no complete checkpoint: {MANIFEST} is missing")
    try:
        manifest = json.loads(read_text(path, most=LARGEST_RECORD))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder} is an incomplete save: {MANIFEST} is no whole JSON file ({error})") from None
    ours = isinstance(manifest, dict) and isinstance(manifest.get("shards"), list)
    if not ours or manifest.get("format") not in (1, FORMAT):
        found = f"of format {manifest['format']!r}" if ours and "format" in manifest else "not of ZeroMesh"
        raise ValueError(f"{path} is {found}; this version reads the formats 1 and {FORMAT}")
    if manifest["format"] == 1:
        _find_bytes(manifest, folder)
    elif manifest.pop("sha256", None) != hash_of(manifest):
        raise ValueError(f"{path} is not the file that was written (SHA-256 differs)")
    require_form(_FORM, manifest, path)
    if any(number >= len(manifest.get("groups", ())) for number in manifest.get("members", {}).values()):
        raise ValueError(f"{path} has members of a parameter group that it does not have; {ANOTHER}")
    return dict(manifest)


def require_run(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError unless a manifest has what a run is continued with."""
    if lacking := [key for key in _OF_A_RUN if key not in manifest]:
        raise ValueError(f"{folder / MANIFEST} lacks {some(lacking)}; {ANOTHER}")


def hash_of(content: dict[str, Any]) -> str:
    """Return the hash of a manifest, which tells it from all others."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def require_sound(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError if a file lies elsewhere, a box is there twice, or its numbers contradict each other."""
    # The hash says that the manifest is as it was written, and not who wrote it.
    files, places = set[str](), set[tuple[str, str]]()
    for shard in manifest["shards"]:
        try:
            file, boxes = shard["file"], [(box, _place(box)) for box in shard["boxes"]]
            hashes = [one.get(key, "") for one in (shard, *shard["boxes"]) for key in ("header", "sha256")]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{folder / MANIFEST} describes a box that cannot be: {error}") from None
        if not is_inside(folder, file) or Path(file).name != file:
            raise ValueError(
                f"{folder / MANIFEST} names the file {file!r}, which is not in the checkpoint's own folder"
            )
        if not all(isinstance(digest, str) for digest in hashes):
            raise ValueError(f"{folder / MANIFEST} has a hash for {file!r} that is no text; {ANOTHER}")
        if file in files:
            raise ValueError(f"{folder / MANIFEST} names the file {file!r} twice")
        files.add(file)
        for box, place in boxes:
            # Twice the same elements would hide that others are missing: a reader counts what it finds.
            if place in places:
                raise ValueError(f"{folder / MANIFEST} has {box['name']}, {place[1]}, twice")
            places.add(place)


def _place(box: dict[str, Any]) -> tuple[str, str]:
    """Return which part of which tensor a box is. Raises what shows that there can be no such box."""
    shape, dtype = box["shape"], getattr(torch, box["dtype"])
    offsets, sizes = box.get("offsets", [0] * len(shape)), box.get("sizes", shape)
    begin, end = box["bytes"]
    numbers = [*shape, *offsets, *sizes, box["start"], box["stop"], begin, end]
    inside = all(offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True))
    # Python takes True for 1, and JSON has fractions.
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers) or not inside:
        raise ValueError(f"{box['name']} lies outside of its tensor")
    if not isinstance(box["name"], str) or not isinstance(box["key"], str):
        raise TypeError(f"{box['name']!r} with the key {box['key']!r} is no name of a tensor")
    if box["name"].startswith("optimizer") and box["name"].count("/") < 2:
        raise ValueError(f"{box['name']} names no state of a parameter")
    if not box["start"] <= box["stop"] <= prod(sizes):
        raise ValueError(f"{box['name']} has elements {box['start']} to {box['stop']} of {prod(sizes)}")
    if dtype not in CODES or end - begin != (box["stop"] - box["start"]) * dtype.itemsize:
        raise ValueError(f"{box['name']} has {end - begin} bytes for its elements of {box['dtype']}")
    return str(box["name"]), f"elements {box['start']} to {box['stop']} of the box {sizes} at {offsets}"


def require_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise FileNotFoundError if a file is missing, ValueError if one is cut off or no box has some elements."""
    # Nothing of the files is read.
    _require_all_elements(folder, manifest)
    for shard in manifest["shards"]:
        path, boxes = folder / shard["file"], shard["boxes"]
        _require_file(path, shard)
        size, wanted = path.stat().st_size, max((box["bytes"][1] for box in boxes), default=0)
        if size < wanted:
            lost = some([box["key"] for box in boxes if box["bytes"][1] > size])
            raise ValueError(f"{path} is cut off after {size:,} of {wanted:,} bytes, and lacks {lost}")


def _require_all_elements(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError unless the boxes of each tensor are all of it, once, and have bytes of their own."""
    of_tensors: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for shard in manifest["shards"]:
        at = 0
        for box in sorted(shard["boxes"], key=lambda box: list(box["bytes"])):
            of_tensors[box["name"]].append(box)
            if box["bytes"][0] < at:
                raise ValueError(f"{folder / MANIFEST} gives {box['key']} bytes of another box; {ANOTHER}")
            at = box["bytes"][1]
    for name, boxes in of_tensors.items():
        shape, dtype = boxes[0]["shape"], boxes[0]["dtype"]
        if any(box["shape"] != shape or box["dtype"] != dtype for box in boxes):
            raise ValueError(f"{folder / MANIFEST} has {name} in several shapes or dtypes; {ANOTHER}")
        places: dict[_Area, list[tuple[int, int]]] = defaultdict(list)
        for box in boxes:
            area = tuple(box.get("offsets", [0] * len(shape))), tuple(box.get("sizes", shape))
            places[area].append((box["start"], box["stop"]))
        ends = {area: [0, *(stop for _, stop in sorted(found))] for area, found in places.items()}
        joined = all([start for start, _ in sorted(places[area])] + [prod(area[1])] == ends[area] for area in places)
        if not joined or not _tiles([*places], ((0,) * len(shape), tuple(shape))):
            raise ValueError(
                f"{folder / MANIFEST}: the boxes of {name} lack some of its elements, or have some twice; {ANOTHER}"
            )


_Area = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box in a tensor, by dimension."""


def _tiles(areas: list[_Area], region: _Area) -> bool:
    """Return whether areas are all of a region, and none overlaps another; each is cut off by cuts right through."""
    # All layouts cut tensors so: the cuts of one axis, and between them those of the others.
    if len(areas) <= 1:
        return areas == [region]
    offsets, sizes = region
    for axis in range(len(sizes)):
        parts: list[list[_Area]] = []
        end, starts = -1, list[int]()
        for area in sorted(areas, key=lambda area: area[0][axis]):
            if area[0][axis] >= end:
                parts.append([])
                starts.append(area[0][axis])
            parts[-1].append(area)
            end = max(end, area[0][axis] + area[1][axis])
        if len(parts) > 1:
            stops = [*starts[1:], offsets[axis] + sizes[axis]]
            return starts[0] == offsets[axis] and all(
                _tiles(part, (_replaced(offsets, axis, start), _replaced(sizes, axis, stop - start)))
                for part, start, stop in zip(parts, starts, stops, strict=True)
            )
    return False


def _replaced(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in torch, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _require_file(path: Path, shard: dict[str, Any]) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, which held {some([box['key'] for box in shard['boxes']])}")


def _find_bytes(manifest: dict[str, Any], folder: Path) -> None:
    """Complete a manifest of format 1 from the headers of its files."""
    dtypes = {code: dtype_name(dtype) for dtype, code in CODES.items()}
    for shard in manifest["shards"]:
        path = folder / MANIFEST
        try:
            path = inside(folder, shard["file"], "a file")
            _require_file(path, shard)
            with open_regular(path) as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, LARGEST_RECORD)))
            for box in shard["boxes"]:
                entry = header[box["key"]]
                begin, end = entry["data_offsets"]
                box.update(dtype=dtypes[entry["dtype"]], bytes=[8 + size + begin, 8 + size + end])
        except _STRUCTURE as error:
            raise ValueError(f"{path} is not the file that was written") from error
