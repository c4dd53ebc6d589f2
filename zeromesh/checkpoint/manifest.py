"""Manifests: the description of a checkpoint, and the check that its files are there and not cut off."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from zeromesh.base.files import (
    LARGEST_RECORD,
    Count,
    DictOf,
    Form,
    ListOf,
    inside,
    is_inside,
    open_regular,
    read_text,
    record_type,
)
from zeromesh.base.version import VERSION
from zeromesh.base.words import some

# Format of manifests that are written; formats 1 and 2, in which one file has the boxes of all ranks, are read, too. It
# rises when a version of this code that reads the present one would read a new manifest wrongly. A new key that may be
# missing does not raise it.
FORMAT = 3

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
        raise ValueError(f"{name!r} is not a dtype of torch")
    return name


def _stored_dtype(name: str) -> str:
    if getattr(torch, name, None) not in CODES:
        raise ValueError(f"{name!r} is not a dtype of a file of tensors")
    return name


def _states(states: dict[str, Any]) -> dict[str, Any]:
    """Return states that are one number, or a tensor of one as its value and its dtype."""
    for key, value in states.items():
        number = value
        if isinstance(value, list):
            number, dtype = value
            torch.tensor(0 + number, dtype=getattr(torch, _dtype(dtype)))  # raises for numbers that it does not have
        if key == "step" and not 0 <= number < 2**53:
            raise ValueError("step is not a number of updates")
    return states


_BOX = record_type({
    "key": str, "name": str, "dtype": Annotated[str, AfterValidator(_stored_dtype)], "shape": list[Count],
    "offsets": NotRequired[list[Count]], "sizes": NotRequired[list[Count]], "start": Count, "stop": Count,
    "bytes": Annotated[list[Count], Field(min_length=2, max_length=2)], "sha256": NotRequired[str | list[str]],
})  # fmt: skip
_SHARD = record_type({"file": str, "boxes": ListOf[_BOX], "header": NotRequired[str], "sha256": NotRequired[str]})
_SCALE = {"scale": Annotated[float, Field(gt=0, allow_inf_nan=False)], "hysteresis": Count, "good_steps": Count}
_SPIKES = {
    "loss": NotRequired[list[float]],
    "gradient norm": NotRequired[list[float]],
    "in a row": NotRequired[Annotated[list[Count], Field(max_length=1)]],
}
_ANY = dict[str, Any]

_FIELDS: dict[str, Any] = {
    "zeromesh": str, "imported": str, "written": str,
    "parameters": DictOf[str, record_type({"dtype": Annotated[str, AfterValidator(_dtype)], "trainable": bool})],
    "frozen_left_out": bool,
    "tied": dict[str, str],
    "world_size": Count,
    "mesh": dict[str, Count],
    "placement": record_type(dict.fromkeys(("parameter", "gradient", "optimizer"), str)),
    "train_batch_size": Count,
    "global_steps": Count, "global_samples": Count, "micro_steps": Count, "skipped_steps": Count,
    "spikes": record_type(_SPIKES),
    "data": record_type({"number": Count, "samples": Count, "length": Count, "seed": int | None}) | None,
    "loss_scaler": record_type(_SCALE) | None,
    "scheduler": _ANY | None, "scheduler_type": str | None,
    "optimizer": str | list[str],
    "groups": list[_ANY],
    "members": dict[str, Count],
    "scalars": dict[str, Annotated[_ANY, AfterValidator(_states)]],
    "client_state": _ANY,
    "extra": _ANY,
    "model": _ANY,
}  # fmt: skip
"""Entries of manifests, and their types."""

BY_PARAMETER = ("scalars", "members")
"""Entries of a rank's manifest: what it knows of the parameters that it updates."""

OF_STAGES = ("parameters", "tied", "extra")
"""Entries of which the first rank of each pipeline stage has those of its stage."""

_STRIDES = list[Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=2, max_length=2)]]
_AREA = record_type(
    dict.fromkeys(("offsets", "sizes"), NotRequired[list[Count]])
    | dict.fromkeys(("rank", "first", "stop", "last", "start"), NotRequired[Count])
    | {"strides": NotRequired[_STRIDES]}
)
_TENSOR = record_type(
    {"dtype": Annotated[str, AfterValidator(_stored_dtype)], "shape": list[Count], "areas": ListOf[_AREA]}
)
_INDEX = {
    "shards": ListOf[record_type({"sha256": str, "bytes": Count})],
    "strides": _STRIDES,
    "tensors": DictOf[str, _TENSOR],
}


def _form(fields: dict[str, Any]) -> Form:
    return TypeAdapter(record_type({name: NotRequired[kind] for name, kind in fields.items()}))


_FORMS = {FORMAT: _form(_FIELDS | _INDEX)} | dict.fromkeys((1, 2), _form(_FIELDS | {"shards": ListOf[_SHARD]}))
PART_FORM = _form({key: _FIELDS[key] for key in BY_PARAMETER} | {"shard": _SHARD})

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


def require_form(form: Form, values: Any, path: Path) -> None:
    """Raise ValueError, with the first value that is wrong, unless values are of a form."""
    with as_written(path):
        try:
            form.validate_python(values, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place, rule = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            problem = f"{place} is {str(first['input'])[:80]!r} ({rule})"
            raise ValueError(f"{path} is not of the form that is written: {problem}; {ANOTHER}") from None


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
        raise FileNotFoundError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing")
    try:
        manifest = json.loads(read_text(path, most=LARGEST_RECORD))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder} is an incomplete save: {MANIFEST} is not a complete JSON file ({error})") from None
    ours = isinstance(manifest, dict) and isinstance(manifest.get("shards"), list)
    number = manifest.get("format") if ours else None
    if not isinstance(number, int) or number not in _FORMS:
        reads = f"this version, {VERSION}, reads the formats 1 to {FORMAT}"
        if not ours or "format" not in manifest:
            raise ValueError(f"{path} is not of ZeroMesh; {reads}")
        writer = f"{manifest.get('zeromesh', 'a later version')!s:.40}"
        raise ValueError(
            f"{path} is of format {number!r}; {reads}: install the version that wrote it, {writer}, or a later one"
        )
    if number == 1:
        _find_bytes(manifest, folder)
    elif (digest := manifest.pop("sha256", None)) != hash_of(manifest):
        raise ValueError(f"{path} is not the file that was written (SHA-256 differs)")
    require_form(_FORMS[number], manifest, path)
    require_groups(path, manifest, manifest)
    if number == FORMAT:
        _require_areas(path, manifest)
        return {"tensors": {}, **manifest, "sha256": digest}
    for shard in manifest["shards"]:
        require_sound(path, shard)
    for file, count in Counter(shard["file"] for shard in manifest["shards"]).items():
        if count > 1:
            raise ValueError(f"{path} names the file {file!r} twice; {ANOTHER}")
    return {"sha256": hash_of(manifest), **manifest, "tensors": _tensors(manifest)}


def _require_areas(path: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError if an index has an area outside of its tensor, or shares of ranks that there are not."""
    count = len(manifest["shards"])
    for name, tensor in manifest.get("tensors", {}).items():
        for area in tensor["areas"]:
            shape, numbers = tensor["shape"], [area.get(key, 0) for key in ("rank", "first", "last")]
            offsets, sizes = area_of({"shape": shape, **area})
            is_outside = any(area.get(key, 0) > prod(sizes) for key in ("stop", "start"))
            if is_outside or not _is_within(offsets, sizes, shape) or max(numbers) >= count:
                raise ValueError(f"{path} has an area of {name} that cannot be: {str(area)[:200]}; {ANOTHER}")


def _tensors(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what an index has of tensors, without areas, from the boxes of all ranks."""
    boxes = (box for shard in manifest["shards"] for box in shard["boxes"])
    return {box["name"]: {"dtype": box["dtype"], "shape": box["shape"], "areas": []} for box in boxes}


def require_groups(path: Path, named: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Raise ValueError if parameters are members of groups that a manifest does not have."""
    if any(number >= len(manifest.get("groups", ())) for number in named.get("members", {}).values()):
        raise ValueError(f"{path} has members of a parameter group that it does not have; {ANOTHER}")


def require_run(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError unless a manifest has what a run is continued with."""
    if lacking := [key for key in _OF_A_RUN if key not in manifest]:
        raise ValueError(f"{folder / MANIFEST} lacks {some(lacking)}; {ANOTHER}")


def hash_of(content: dict[str, Any]) -> str:
    """Return the hash of a manifest, which tells it from all others."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def require_sound(path: Path, shard: dict[str, Any], index: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError if a file lies elsewhere, or the numbers of a box contradict each other or the index."""
    # The hash says that the manifest at ``path`` is as it was written, and not who wrote it.
    file, end = shard["file"], 0
    if not is_inside(path.parent, file) or Path(file).name != file:
        raise ValueError(f"{path} names the file {file!r}, which is not in the checkpoint's own folder; {ANOTHER}")
    for box in shard["boxes"]:
        facts = {} if index is None else index["tensors"].get(box["name"], {"shape": None})
        if problem := _contradiction(box, facts):
            raise ValueError(f"{path} describes a box that cannot be: {box['name']} {problem}; {ANOTHER}")
    for box in sorted(shard["boxes"], key=lambda box: list(box["bytes"])):
        if box["bytes"][0] < end:
            raise ValueError(f"{path} gives {box['key']} bytes of another box; {ANOTHER}")
        end = box["bytes"][1]


def _contradiction(box: dict[str, Any], facts: Mapping[str, Any]) -> str:
    """Return what of a box cannot be, also by the ``facts`` of its tensor; "" if nothing."""
    (offsets, sizes), shape, (begin, end) = area_of(box), box["shape"], box["bytes"]
    count, size = box["stop"] - box["start"], getattr(torch, box["dtype"]).itemsize
    if not _is_within(offsets, sizes, shape):
        return "lies outside of its tensor"
    if not box["start"] <= box["stop"] <= prod(sizes):
        return f"has elements {box['start']} to {box['stop']} of {prod(sizes)}"
    if end - begin != count * size or end >= 2**53:
        return f"has {end - begin} bytes for its elements of {box['dtype']}"
    if box["name"].startswith("optimizer") and box["name"].count("/") < 2:
        return "names no state of a parameter"
    if any(box[key] != facts[key] for key in ("shape", "dtype") if key in facts):
        return f"has another shape or dtype than in {MANIFEST}"
    return ""


def _is_within(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    places = zip(offsets, sizes, shape, strict=False)
    return len(offsets) == len(sizes) == len(shape) and all(at + length <= end for at, length, end in places)


def require_files(folder: Path, shards: Iterable[dict[str, Any]]) -> None:
    """Raise FileNotFoundError if a file is missing, ValueError if one is cut off. Nothing of it is read."""
    for shard in shards:
        path, boxes = folder / shard["file"], shard["boxes"]
        _require_file(path, shard)
        size, wanted = path.stat().st_size, max((box["bytes"][1] for box in boxes), default=0)
        if size < wanted:
            lost = some([box["key"] for box in boxes if box["bytes"][1] > size])
            raise ValueError(f"{path} is cut off after {size:,} of {wanted:,} bytes, and lacks {lost}")


def require_all_elements(folder: Path, shards: Iterable[dict[str, Any]], names: Iterable[str] = ()) -> None:
    """Raise ValueError unless the boxes of each tensor, of all files, are all of it, once; ``names`` have boxes."""
    of_tensors: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for shard in shards:
        for box in shard["boxes"]:
            of_tensors[box["name"]].append(box)
    if lacking := [name for name in names if name not in of_tensors]:
        raise ValueError(f"{folder / MANIFEST} has {some(lacking)}, of which no file has elements; {ANOTHER}")
    for name, boxes in of_tensors.items():
        shape, dtype = boxes[0]["shape"], boxes[0]["dtype"]
        if any(box["shape"] != shape or box["dtype"] != dtype for box in boxes):
            raise ValueError(f"{folder / MANIFEST} has {name} in several shapes or dtypes; {ANOTHER}")
        if not are_all(shape, ((*area_of(box), box["start"], box["stop"]) for box in boxes)):
            raise ValueError(
                f"{folder / MANIFEST}: the boxes of {name} lack some of its elements, or have some twice; {ANOTHER}"
            )


def area_of(box: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes, by dimension, of the part of a tensor in which the elements of a box are."""
    return tuple(box.get("offsets", [0] * len(box["shape"]))), tuple(box.get("sizes", box["shape"]))


MOST_CUT = 8
"""Most dimensions along which one tensor is cut."""


def are_all(shape: Sequence[int], ranges: Iterable[tuple[tuple[int, ...], tuple[int, ...], int, int]]) -> bool:
    """Return whether ranges are all elements of a shape, each once: (offsets, sizes, first, last + 1 in that area)."""
    areas: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for offsets, sizes, start, stop in ranges:
        areas[offsets, sizes].append((start, stop))
    for (_, sizes), parts in areas.items():
        begins, ends = zip(*sorted(parts), strict=True)
        if (*begins, prod(sizes)) != (0, *ends):
            return False
    cut = [axis for axis, size in enumerate(shape) if any(sizes[axis] != size for _, sizes in areas)]
    if len(cut) > MOST_CUT or sum(prod(sizes) for _, sizes in areas) != prod(shape):
        return False
    # Corners that an even number of areas have cancel out. Only if those of the whole shape are left, each of its
    # elements is in an odd number of areas; as there are no more elements than that, it is in one.
    odd: set[tuple[int, ...]] = set()
    for offsets, sizes in [*areas, ((0,) * len(shape), tuple(shape))]:
        for corner in product(*((offsets[axis], offsets[axis] + sizes[axis]) for axis in cut)):
            odd ^= {corner}
    return not odd


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
