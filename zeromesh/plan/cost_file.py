"""Costs as JSON, and a folder of them on disk, keyed by a hash of the model."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from zeromesh.plan.cost import Divided, KernelWork, ModelCost, Recompute, UnitCost, WorkKind

_log = logging.getLogger(__name__)

KEPT = 256  # files of a folder; the oldest beyond that are deleted


def cost_folder() -> Path:
    """Return the user's folder of costs, below ``XDG_CACHE_HOME``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "zeromesh" / "costs"


def cost_to_json(cost: ModelCost) -> dict[str, Any]:
    """Return a cost in plain values; units that are alike but for their names are written once."""
    kinds: dict[str, int] = {}
    units = []
    for unit in cost.units:
        plain = _plain(unit)
        text = json.dumps({**plain, "name": ""})
        units.append([unit.name, kinds.setdefault(text, len(kinds))])
    return {**_plain(cost, ("units",)), "kinds": [json.loads(text) for text in kinds], "units": units}


def cost_from_json(data: Mapping[str, Any]) -> ModelCost:
    """Return the cost that ``cost_to_json`` wrote; raise ValueError for anything else."""
    try:
        kinds = [_unit(kind) for kind in data["kinds"]]
        units = []
        for name, number in data["units"]:
            plain = {f.name: getattr(kinds[number], f.name) for f in fields(UnitCost)}
            units.append(UnitCost(**{**plain, "name": str(name)}))
        rest = {f.name: data[f.name] for f in fields(ModelCost) if f.name != "units"}
        return ModelCost(**rest, units=tuple(units))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"this is no cost of a model: {type(error).__name__} {error}") from error


def _plain(value: Any, leave: tuple[str, ...] = ()) -> Any:
    if isinstance(value, Divided):
        return list(value)
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name not in leave}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value


def _unit(data: Mapping[str, Any]) -> UnitCost:
    plain: dict[str, Any] = dict(data)
    for f in fields(UnitCost):
        if f.type == "Divided":
            plain[f.name] = Divided(*plain[f.name])
    plain["saved"] = {Recompute(key): Divided(*one) for key, one in plain["saved"].items()}
    for phase in ("forward", "input", "weight"):
        plain[phase] = tuple(_work(one) for one in plain[phase])
    return UnitCost(**plain)


def _work(data: Mapping[str, Any]) -> KernelWork:
    shape = data["shape"] and tuple(data["shape"])
    more = {"kind": WorkKind(data["kind"]), "shape": shape}
    return KernelWork(**{**data, **more, "flops": Divided(*data["flops"]), "moved": Divided(*data["moved"])})


class CostFolder:
    """Folder of JSON files. Several processes may write to it; a damaged file counts as none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> Any:
        """Return what was written under a name; None where there is nothing, or something damaged."""
        try:
            return json.loads((self._path / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, name: str, data: Any) -> None:
        """Keep plain values under a name. A folder that cannot be written to keeps nothing, with a line in the log."""
        # Renaming is atomic: readers see a whole file, and the last of several writers wins.
        part = self._path / f"{name}.{os.getpid()}.part"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(data), encoding="utf-8")
            part.replace(self._path / f"{name}.json")
            self._shrink()
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            _log.info("costs of models are not kept in %s: %s", self._path, error)

    def _shrink(self) -> None:
        files = sorted(self._path.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-KEPT]:
            file.unlink(missing_ok=True)
