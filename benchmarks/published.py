"""Published measurements: rows of a file, and the shape and layout that each one states.

A row states a model, hardware, a layout and what a source has measured. Everything that is predicted for it follows
from the first three; identifiers and measured values never enter a prediction.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.apps.plan.cost.shape import LatentAttention, TransformerShape
from zeromesh.base.placement import ROWS as PLACEMENTS
from zeromesh.base.placement import Placement, PlacementRow, Tier
from zeromesh.shard.sizes import Widths

# Fields of a row by the form of their values. What reads those of "any" checks them, as they take several forms.
_FIELDS = {
    "a whole number above 0": {
        "model": "layers hidden heads kv_heads ffn vocab seq experts top_k expert_ffn shared_experts dense_layers "
        "head_width window mtp",
        "hardware": "gpus gpus_per_node",
        "layout": "replicate dp fsdp pp cp ep etp vp interleave micro_batch micro_batches global_batch local_batch "
        "batch_per_dp",
    },
    "a number above 0": {
        "model": "params params_total params_active largest_layer", "hardware": "host_gb peak_tflops",
        "layout": "seq_tokens_per_step",
    },
    "a text": {
        "model": "name", "hardware": "gpu",
        "layout": "precision recompute schedule scheme framework gradients optimizer lora dispatcher kernels units experts "
        "optimizer_states",
    },
    "true or false": {
        "model": "tied gated",
        "layout": "sequence_parallel compile async_tp cross_entropy_fusion fused_cross_entropy deepspeed alst overlap",
    },
    "any": {
        "model": "mla note origin", "layout": "zero tp offload offload_param offload_optimizer offload_fraction zero_init",
    },
}  # fmt: skip
_FORMS = {
    f"{group}.{name}": form
    for form, parts in _FIELDS.items()
    for group, names in parts.items()
    for name in names.split()
}
_ZERO_IS_NONE = (
    "model.dense_layers",
    "model.mtp",
    "layout.fsdp",
    "layout.ep",
    "layout.vp",
    "layout.interleave",
    "layout.cp",
)
GROUPS = ("model", "hardware", "layout")


# Names of sources for models of the table.
_ALIASES = {
    "qwen3_30b_a3b": "qwen3-30b-a3b", "qwen3_235b_a22b": "qwen3-235b-a22b", "gpt oss 120b": "gpt-oss-120b",
    "gpt oss 20b": "gpt-oss-20b", "deepseekv3": "deepseek-v3", "kimi_k2": "kimi-k2",
}  # fmt: skip


class UnjudgedError(ValueError):
    """A row that says too little, or something that the planner has no model of; the text is the reason."""


class Outcome(NamedTuple):
    """Prediction for one quantity of a row, beside what was measured."""

    row: str  # identifier
    source: str
    quantity: str  # name of the measured value
    predicted: float | None  # None: the row cannot be judged
    measured: float
    note: str = ""  # reason why it cannot be judged, or what the prediction assumes
    decimals: int = 12  # printed by the source
    high: float | None = None  # upper end of the prediction, where the row's inputs are cut off
    fitted: bool = False  # the row has decided a constant of the prediction, so its error says less

    @property
    def error(self) -> float | None:
        """Relative error with its sign, of the prediction; None where there is none."""
        if self.predicted is None:
            return None
        nearest = self.predicted if self.high is None else min(max(self.measured, self.predicted), self.high)
        return (nearest - self.measured) / self.measured if self.measured else float(nearest != 0)

    @property
    def printed(self) -> bool:
        """True if the source would print the prediction as it printed the figure, rounded or cut off."""
        if self.predicted is None:
            return False
        # Nothing but floating point is forgiven beyond the last digit.
        unit = 10.0**-self.decimals
        slack, high = unit * 1e-6, self.predicted if self.high is None else self.high
        rounded = self.predicted - unit / 2 - slack <= self.measured <= high + unit / 2 + slack
        return rounded or -slack <= high - self.measured < unit


@dataclass(frozen=True)
class PublishedRow:
    """One row of the file, checked."""

    id: str
    source: str
    kind: str
    where: str
    note: str
    model: Mapping[str, Any]  # of the row, completed by the file's table of models
    hardware: Mapping[str, Any]
    layout: Mapping[str, Any]
    measured: Mapping[str, Any]
    unknown: tuple[str, ...] = ()  # fields that nothing here reads

    def outcome(self, quantity: str, predicted: float | None, note: str = "", measured: float | None = None) -> Outcome:
        """Return the outcome of one quantity; ``measured`` where it is not a number of the row."""
        value = self.measured[quantity] if measured is None else measured
        if self.unknown:
            note = f"{note}; ignored: {', '.join(self.unknown)}".lstrip("; ")
        return Outcome(self.id, self.source, quantity, predicted, float(value), note, _decimals(value))

    # What the row states, in the planner's terms.

    def needs(self, group: str, name: str) -> Any:
        """Return a field; raise UnjudgedError where the row does not say it."""
        value = getattr(self, group).get(name)
        if value is None:
            raise UnjudgedError(f"the row does not say {group}.{name}")
        return value

    def refuse_unknown_experts(self) -> None:
        """Raise UnjudgedError for a mixture of experts whose sizes the row and the table of models do not say."""
        mixture = (self.layout.get("ep") or 1) > 1 or self.model.get("params_active")
        if mixture and not self.model.get("experts"):
            raise UnjudgedError("a mixture of experts; the row lacks its sizes")

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return int(self.needs("model", "seq"))

    @property
    def shape(self) -> TransformerShape:
        """Sizes of the model; raise UnjudgedError where the row and the table of models do not say them."""
        sizes = {name: int(self.needs("model", name)) for name in ("layers", "hidden", "heads", "vocab")}
        model, gated = self.model, bool(self.model.get("gated", False))
        return TransformerShape(
            layers=sizes["layers"], hidden=sizes["hidden"], heads=sizes["heads"], vocabulary=sizes["vocab"],
            kv_heads=model.get("kv_heads") or 0, width=model.get("ffn") or 0, head_width=model.get("head_width") or 0,
            gated=gated, biases=model.get("biases", not gated), tied=bool(model.get("tied", True)),
            # GPT models of these sources learn positions and drop; gated models are of Llama's form and do neither.
            positions=0 if gated else int(model.get("seq") or 0), dropout=not gated, name=str(model["name"]),
            **self._experts(),
        )  # fmt: skip

    def _experts(self) -> dict[str, Any]:
        """Return the sizes of experts and of latent attention."""
        model, latent = self.model, self.model.get("mla")
        sizes: dict[str, Any] = {"window": int(model.get("window") or 0), "extra_heads": int(model.get("mtp") or 0)}
        if latent:
            ranks = int(latent.get("q_rank") or 0), int(latent["kv_rank"])
            sizes["latent"] = LatentAttention(*ranks, int(latent["nope"]), int(latent["rope"]), int(latent["v"]))
        if model.get("experts"):
            width = int(model.get("expert_ffn") or self.needs("model", "ffn"))
            shared = int(model.get("shared_experts") or 0)
            sizes |= {
                "experts": int(model["experts"]),
                "chosen": int(self.needs("model", "top_k")),
                "expert_width": width,
            }
            sizes |= {"shared_width": shared * width, "dense_layers": int(model.get("dense_layers") or 0)}
        return sizes

    @property
    def placement(self) -> PlacementRow:
        """Placement of states over ranks and tiers."""
        row = PLACEMENTS[self.stage]
        parameters, optimizer = _tiers(self)
        if parameters is not Tier.DEVICE and self.stage == 0:
            row = PLACEMENTS[3]  # what leaves the device comes back unit by unit, as where it is sharded
        if optimizer is not Tier.DEVICE and row.optimizer is Placement.REPLICATED:
            row = replace(row, optimizer=Placement.SHARDED)
        if row.parameter is Placement.REPLICATED:
            parameters = Tier.DEVICE
        return replace(
            row, parameter_tier=parameters, optimizer_tier=optimizer,
            gradient_tier=Tier.DEVICE if optimizer is Tier.DEVICE else Tier.HOST,
            offloaded=float(self.layout.get("offload_fraction") or 1.0),
        )  # fmt: skip

    @property
    def stage(self) -> int:
        """ZeRO number; 0 where the row names none."""
        stage = self.layout.get("zero")
        if isinstance(stage, str):  # sources of a framework of another name say it in words
            stage = 2 if "gradients" in stage else 1
        if stage is None and self.layout.get("fsdp"):
            stage = 3
        if stage not in (None, 0, 1, 2, 3):
            raise UnjudgedError(f"layout.zero is {stage!r}, which is not a known stage")
        return int(stage or 0)

    @property
    def parallel(self) -> ParallelLayout:
        """Layout in the planner's terms; raise UnjudgedError where it says too little."""
        said = self.layout
        tensor, pipeline, context = (_size(self, name) for name in ("tp", "pp", "cp"))
        chunks = int(said.get("vp") or said.get("interleave") or 1)
        data = said.get("dp") or said.get("fsdp")
        experts, gpus = _size(self, "ep"), self.hardware.get("gpus")
        if data and gpus == int(data) * tensor * pipeline * context * experts:
            data = int(data) * experts  # expert ranks are counted beside those of data parallelism
        if not data:
            gpus = self.needs("hardware", "gpus")
            data, rest = divmod(int(gpus), tensor * pipeline * context)
            if rest or not data:
                raise UnjudgedError(
                    f"hardware.gpus is {gpus}, not a multiple of {tensor} x {pipeline} x {context} ranks"
                )
        micro_batch, accumulation = _batches(self, int(data), pipeline)
        recompute = str(said.get("recompute") or "none")
        sequence = said.get("sequence_parallel")
        return ParallelLayout(
            data=int(data), tensor=tensor, context=context, pipeline=pipeline, row=self.placement,
            micro_batch=micro_batch, accumulation=accumulation, chunks=chunks,
            schedule="interleaved-1f1b" if chunks > 1 and pipeline > 1 else "1f1b", recompute=_recompute(recompute),
            sequence=bool(sequence) if sequence is not None else "sequence" in recompute, widths=Widths(),
            expert=_size(self, "ep"), expert_tensor=_size(self, "etp") if said.get("etp") else 0,
        )  # fmt: skip

    @property
    def device_memory(self) -> float:
        """Bytes of the device, from its name; raise UnjudgedError where the name does not say them."""
        found = re.search(r"(\d+) ?GB", str(self.needs("hardware", "gpu")))
        if found is None:
            raise UnjudgedError(f"hardware.gpu is {self.hardware['gpu']!r}, which does not say its memory")
        return int(found[1]) * 2.0**30


@dataclass(frozen=True)
class PublishedRows:
    """All rows of a file."""

    rows: tuple[PublishedRow, ...]
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # title and address of each


def read_rows(path: str | Path) -> PublishedRows:
    """Return the rows of a file.

    Raises:
        ValueError: the file is missing, or no JSON; or a row has a field of another type, an impossible value, or lacks
            a part. The text names the file and the row.
    """
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; give a file of published rows") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise ValueError(f'{path}: it has no list "rows"; give a file of published rows')
    models, sources = found.get("models", {}), found.get("sources", {})
    for name, part in (("models", models), ("sources", sources)):
        if not isinstance(part, dict) or not all(isinstance(entry, dict) for entry in part.values()):
            raise ValueError(f'{path}: "{name}" must be an object of objects')
    rows = tuple(_row(entry, f"{path}: row {index}", models) for index, entry in enumerate(found["rows"]))
    name, times = max(Counter(row.id for row in rows).items(), key=lambda one: one[1], default=("", 1))
    if times > 1:
        raise ValueError(f"{path}: the id {name!r} is of several rows; each needs one of its own")
    return PublishedRows(rows, sources)


def _row(entry: Any, place: str, models: Mapping[str, Any]) -> PublishedRow:
    if not isinstance(entry, dict):
        raise ValueError(f"{place} is {entry!r}; it must be an object")
    texts = {name: entry.get(name, "") for name in ("id", "source", "kind", "where", "note")}
    if isinstance(texts["id"], str) and texts["id"]:
        place = f"{place} ({texts['id']})"
    for name, text in texts.items():
        if not isinstance(text, str) or (not text and name in ("id", "source", "kind")):
            raise ValueError(f"{place}: {name} is {text!r}; it must be a text")
    for group in (*GROUPS, "measured"):
        if not isinstance(entry.get(group), dict):
            raise ValueError(f"{place}: {group} is {entry.get(group)!r}; it must be an object")
    unknown = [name for group in GROUPS for name in _check_group(group, entry[group], place)]
    _check_measured(entry["measured"], place)
    if not entry["model"].get("name"):
        raise ValueError(f"{place}: model.name is missing; every row names its model")
    name = str(entry["model"]["name"])
    known = models.get(_ALIASES.get(re.sub(r" \(.*\)", "", name).lower(), name), {})
    _check_group("model", known, f"{place}: in the table of models")
    # The row's own sizes win: some measure a model with fewer layers.
    own = {name: value for name, value in entry["model"].items() if value is not None}
    model = {**known, **own}
    if "layers" in own and own["layers"] != known.get("layers", own["layers"]) and "params" not in own:
        model.pop("params", None)
        # Mixtures are cut to blocks of which at most the first is dense, without further heads.
        model |= {name: min(model[name], most) for name, most in (("dense_layers", 1), ("mtp", 0)) if name in model}
    groups = {group: entry[group] for group in ("hardware", "layout", "measured")}
    return PublishedRow(**texts, model=model, unknown=tuple(unknown), **groups)


def _check_group(group: str, values: Mapping[str, Any], place: str) -> list[str]:
    """Raise ValueError for a value of the wrong form; return the names of fields that are not known."""
    unknown = []
    for name, value in values.items():
        field = f"{group}.{name}"
        form = _FORMS.get(field)
        if form is None and value is not None:
            unknown.append(field)
        if value is None or form in (None, "any") or (value == 0 and field in _ZERO_IS_NONE):
            continue
        if form in ("a text", "true or false"):
            fits = isinstance(value, str if form == "a text" else bool)
        else:
            fits = _is_number(value) and value > 0 and (form == "a number above 0" or value == int(value))
        if not fits:
            raise ValueError(f"{place}: {field} is {value!r}; it must be {form}")
    return unknown


def _check_measured(values: Mapping[str, Any], place: str) -> None:
    if not values:
        raise ValueError(f"{place}: measured is empty; a row without a figure checks nothing")
    for name, value in values.items():
        if value is None:  # the source does not print it
            continue
        for part in value.values() if isinstance(value, dict) else [value]:
            if not _is_number(part) or part < 0:
                raise ValueError(f"{place}: measured.{name} is {part!r}; it must be a number that is not below 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _decimals(value: Any) -> int:
    text = repr(value)
    digits = text.split(".")[1] if "." in text and "e" not in text else ""
    return 0 if digits == "0" else len(digits)


def _size(row: PublishedRow, name: str) -> int:
    value = row.layout.get(name)
    if value is None or value == 0:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnjudgedError(f"layout.{name} is {value!r}, which is not a number of ranks")
    return value


def _batches(row: PublishedRow, data: int, pipeline: int) -> tuple[int, int]:
    """Return the micro-batch and the number of them."""
    said = row.layout
    micro, count = said.get("micro_batch"), said.get("micro_batches")
    local = said.get("local_batch") or said.get("batch_per_dp")
    if local is None and said.get("global_batch"):
        local, rest = divmod(int(said["global_batch"]), data)
        if rest or not local:
            raise UnjudgedError(f"layout.global_batch is {said['global_batch']}, not a multiple of {data} data ranks")
    if micro is None:
        if local is None:
            raise UnjudgedError("the row does not say layout.micro_batch")
        # A pipeline cuts a local batch into samples; without one it is computed at once, unless the row counts parts.
        micro = max(1, local // count) if count else (1 if pipeline > 1 else local)
    if count is None:
        count, rest = divmod(int(local), int(micro)) if local is not None else (1, 0)
        if rest:
            raise UnjudgedError(f"the local batch {local} is not a multiple of the micro-batch {micro}")
    return int(micro), int(count)


def _recompute(text: str) -> Recompute:
    text = text.removesuffix("?")
    if "selective" in text:
        return Recompute.SELECTIVE
    if all(part in MODULES for part in text.split(", ")):
        return Recompute.SELECTIVE
    named = {"none": Recompute.NONE, "sequence": Recompute.NONE, "full": Recompute.BLOCKS}
    if text not in named:
        raise UnjudgedError(f"layout.recompute is {text!r}, which is not a known policy")
    return named[text]


MODULES = ("norm", "act", "moe_act", "mla_up_proj", "dense mlp", "dense mlp recomputed", "moe", "core_attn")
"""Modules that Megatron may compute again, each alone."""


def said_parts(row: PublishedRow) -> tuple[str, ...]:
    """Return the modules that are computed again, each alone."""
    parts = str(row.layout.get("recompute") or "").split(", ")
    return tuple(parts) if all(part in MODULES for part in parts) else ()


def _tiers(row: PublishedRow) -> tuple[Tier, Tier]:
    """Return the tiers of parameters and of the optimizer's states."""
    said = row.layout
    if "offload_param" in said or "offload_optimizer" in said:
        named = {None: Tier.DEVICE, "none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
        pair = said.get("offload_param"), said.get("offload_optimizer")
        if any(not isinstance(value, str | None) or value not in named for value in pair):
            raise UnjudgedError(f"layout.offload_param and offload_optimizer are {pair}, which are not known tiers")
        return named[pair[0]], named[pair[1]]
    text = said.get("offload") or ""
    if not text:
        return Tier.DEVICE, Tier.DEVICE
    tier = Tier.NVME if "nvme" in text else Tier.HOST
    # "optimizer cpu" says what leaves the device; "all cpu" and a bare tier mean everything that can.
    return (Tier.DEVICE if "optimizer" in text else tier), tier
