"""The configuration that ``zeromesh init`` writes, and that ``zeromesh train MODEL DATA`` uses, with its comments."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.apps.train.data.hub_datasets import is_dataset_id
from zeromesh.apps.train.data.sources import Part, find_documents, look
from zeromesh.apps.train.screen import is_first, write
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.files import read_text
from zeromesh.base.words import bytes_text, counted, nearest, scaled_text
from zeromesh.checkpoint.weights.pretrained import is_model_id, model_folder
from zeromesh.config.document import whole_document


class Size(NamedTuple):
    """A model to train from scratch."""

    hidden: int
    layers: int
    heads: int
    length: int  # tokens per sample
    rate: float  # learning rate
    steps: int


SIZES = {
    "tiny": Size(192, 4, 3, 256, 2e-3, 500),
    "small": Size(512, 8, 8, 512, 1e-3, 5_000),
    "medium": Size(768, 12, 12, 1024, 6e-4, 20_000),
}
DEVICES = ("cpu", "gpu")
LENGTHS = {"steps", "epochs"}  # keys of run, of which a configuration has one

RATES = ((50e6, 1e-3, 2e-3), (1e9, 5e-5, 3e-4), (float("inf"), 1e-5, 2e-4))
"""Learning rates of models of up to so many parameters: of all weights, and of adapters."""

PREFERENCE_RATE = 0.1  # of these rates, for DPO
PAIR_BYTES = 1000  # of a record of two answers, roughly

MICRO_TOKENS = ((200e6, 16_384), (2e9, 8_192), (float("inf"), 4_096))
"""Tokens of a micro-batch on a GPU, for models of up to so many parameters."""

STATES = 0.6  # share of a device's memory for weights, gradients and the optimizer; the rest is for activations
GPU_BYTES = 24e9  # of a GPU that is not here

# Bytes per parameter on each of n devices. Weights and gradients have 16 bits; AdamW has 12 bytes. A row: the stage,
# what else the section has, the bytes if all weights are trained, and those if adapters are.
Bytes = Callable[[int], float]
LAYOUTS: tuple[tuple[int, dict[str, Any], Bytes, Bytes], ...] = (
    (0, {}, lambda n: 18.0, lambda n: 2.2),
    (2, {}, lambda n: 2 + 16 / n, lambda n: 2.2),
    (3, {}, lambda n: 18 / n, lambda n: 2.2 / n),
    (3, {"offload_optimizer": {"device": "cpu"}}, lambda n: 4 / n, lambda n: 2.2 / n),
    (3, {key: {"device": "cpu"} for key in ("offload_optimizer", "offload_param")}, lambda n: 0, lambda n: 0),
)

MODEL_FORMS = (
    f"a folder of a transformers model, a name on the Hugging Face Hub (org/name), or a size to train from scratch: "
    f"{', '.join(SIZES)}"
)
DATA_FORMS = "a file, a folder, a pattern such as 'texts/*.txt', org/name on the Hub, or python-stdlib"


class Model(NamedTuple):
    """A model of a command line."""

    name: str
    size: Size | None  # of one that is trained from scratch
    parameters: float  # an estimate
    positions: int
    has_weights: bool


class Data(NamedTuple):
    """Training data of a command line."""

    source: str
    bytes: int | None  # None for data that is not here
    kind: str | None  # of its records; None for text, and for what is not known


@dataclass(frozen=True)
class TrainDevice:
    """Devices of one kind."""

    kind: str  # of ``DEVICES``
    count: int
    bytes: float  # of memory of each
    precision: str | None  # section that is switched on; None for fp32
    here: bool


@dataclass(frozen=True)
class Start:
    """Answers from which a configuration is made."""

    model: Model
    data: Data
    device: TrainDevice
    lora: bool
    output: str


def configuration_of(source: str, data: str | None, overrides: Sequence[str] = ()) -> Path | dict[str, Any]:
    """Return the configuration that ``zeromesh train`` is given, or that of a model and data; tell which.

    Args:
        source: the path of a configuration, or a model.
        data: data of the model; None for a configuration.
        overrides: changes as in ``Settings.load``, which say how the data is read; a length replaces the default one.

    Raises:
        ValueError: the two arguments are no model and no data, or one of them alone is no configuration.
    """
    path = Path(source).expanduser()
    if data is None:
        if path.is_dir() or (source in SIZES and not path.exists()):
            what = "the folder of a model" if path.is_dir() else "the size of a model"
            raise ValueError(
                f"{source!r} is {what}; name the data, too: zeromesh train {source} DATA; DATA is {DATA_FORMS}"
            )
        if path.is_file() and path.suffix.lower() in TEXTS:
            raise ValueError(
                f"{source!r} is data; name the model first: zeromesh train MODEL {source}; MODEL is {MODEL_FORMS}"
            )
        if not path.exists() and (close := nearest(source, SIZES)):
            raise ValueError(
                f"{source!r} is no file; did you mean the model {close}? Name the data, too: zeromesh train {close} "
                f"DATA; DATA is {DATA_FORMS}"
            )
        return path
    start = start_of(source, data, overrides=overrides)
    if is_first():
        write(
            f"no configuration file: {summary_of(start)}; `zeromesh init {shlex.join([source, data])}` writes the "
            "configuration, and --set KEY=VALUE changes a key\n"
        )
    return overridden(document_of(start), overrides)


def overridden(document: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a configuration of ``document_of`` with overrides in place; their length of the run replaces its own."""
    run = whole_document({}, overrides).get("run")
    if isinstance(run, dict) and LENGTHS & run.keys():
        document = {**document, "run": {key: value for key, value in document["run"].items() if key not in LENGTHS}}
    return whole_document(document, overrides)


def model_named(name: str) -> Model:
    """Return the model of a name; raise ValueError with the choices if there is none."""
    path = Path(name).expanduser()
    if name in SIZES and not path.exists():
        size = SIZES[name]
        return Model(name, size, 12.0 * size.layers * size.hidden**2, size.length, False)
    if path.is_file():
        what = f"a configuration, which names its data itself: zeromesh train {name}, with --set data.train=DATA"
        if path.suffix.lower() in TEXTS:
            what = "data, and the model comes first: MODEL DATA"
        raise ValueError(f"{name!r} is {what}; MODEL is {MODEL_FORMS}")
    if not path.is_dir() and not is_model_id(name):
        close = nearest(name, SIZES)
        raise ValueError(f"{name!r} is no model{f'; did you mean {close}?' if close else ''}; MODEL is {MODEL_FORMS}")
    folder = model_folder(name, weights=False)
    try:
        config = json.loads(read_text(folder / "config.json"))
        config = config.get("text_config", config)
        hidden, layers = (int(_first(config, *keys)) for keys in (("hidden_size", "n_embd", "d_model"), LAYERS))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{name!r} has no config.json of a language model of transformers ({error}); MODEL is {MODEL_FORMS}"
        ) from None
    inner = int(_first(config, "intermediate_size", "n_inner", default=4 * hidden) or 4 * hidden)
    experts = int(_first(config, "num_local_experts", "num_experts", "n_routed_experts", default=1) or 1)
    parameters = layers * (4.0 * hidden**2 + 3.0 * hidden * inner * experts) + hidden * config.get("vocab_size", 0)
    longest = int(_first(config, "max_position_embeddings", "n_positions", default=2**20) or 2**20)
    weights = folder != path or any(path.glob("*.safetensors*"))
    return Model(name, None, parameters, longest, weights)


TEXTS = (".jsonl", ".txt", ".csv", ".tsv", ".parquet", ".gz", ".md")  # suffixes of data
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def _first(config: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    value = next((config[key] for key in keys if key in config), default)
    if value is None and default is None:
        raise ValueError(f"it lacks {keys[0]}")
    return value


def data_named(source: str, model: Model, overrides: Sequence[str] = ()) -> Data:
    """Return the data of a name, after a look at its first record; raise ValueError if it cannot be read."""
    if (Path(source).expanduser() / "config.json").is_file() and not model.size:
        raise ValueError(f"{source!r} is the folder of a model, and DATA is {DATA_FORMS}; the order is MODEL DATA")
    if is_dataset_id(source):
        return Data(source, None, None)
    documents = find_documents([source], ())
    part = Part("train0", f"data.train = {source!r}", (tuple(documents[:8]),), 0.0)
    chosen = [override for override in overrides if override.partition(".")[0].strip() == "data"]
    data = TrainSettings.load({"data": {"train": source}}, chosen, tells=False).data
    assert data is not None
    kind = look(data, part, [])[0].kind
    if kind == "chat" and model.size:
        raise ValueError(
            f"{source!r} has chats, which need a model with a tokenizer and a chat template, and {model.name!r} is "
            "trained from scratch; name the folder of a model, or org/name on the Hub"
        )
    return Data(source, sum(document.size for document in documents), kind)


def device_named(kind: str | None) -> TrainDevice:
    """Return the devices of a kind, by default those at hand; raise ValueError for another word."""
    if kind not in (None, *DEVICES):
        raise ValueError(f"{kind!r} is no device; choose one of {', '.join(DEVICES)}")
    # Imported late, with torch: a wrong answer is told at once.
    import torch

    from zeromesh.base.machine import devices, memory
    from zeromesh.comm.detect import Environment, is_launched

    ranks = Environment.detect().world_size if is_launched() else None
    accelerators = devices()
    if kind == "cpu" or (kind is None and not accelerators):
        facts = memory()
        sizes = [size for size in (facts["total_bytes"], facts["limit_bytes"]) if size]
        return TrainDevice("cpu", ranks or 1, min(sizes, default=8e9), None, not accelerators)
    total = min((device["memory_bytes"] or GPU_BYTES for device in accelerators), default=GPU_BYTES)
    has_bf16 = (
        not accelerators or accelerators[0]["type"] != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return TrainDevice(
        "gpu", ranks or len(accelerators) or 1, total, "bf16" if has_bf16 else "fp16", bool(accelerators)
    )


def start_of(
    model: str,
    data: str,
    device: str | None = None,
    lora: bool | None = None,
    output: str = "",
    overrides: Sequence[str] = (),
) -> Start:
    """Return the answers of a command line, with defaults for those that are None; raise ValueError for a wrong one."""
    chosen = model_named(model)
    if lora and not chosen.has_weights:
        raise ValueError(
            f"LoRA adapts weights that are trained already, and {model!r} has none; train all of them with --full"
        )
    source, place = data_named(data, chosen, overrides), device_named(device)
    if lora is None:
        bytes_of_all = LAYOUTS[2][2](place.count) * chosen.parameters
        lora = chosen.has_weights and bytes_of_all > STATES * place.bytes
    names = [Path(name).stem if name == data else Path(name).name for name in (model, data)]
    slug = re.sub(r"[^\w.-]+", "-", "-".join(names)).strip("-.") or "run"
    return Start(chosen, source, place, lora, output or f"runs/{slug}")


def document_of(start: Start) -> dict[str, Any]:
    """Return the configuration."""
    model, data, device = start.model, start.data, start.device
    size = model.size
    on_gpu, is_dpo = device.kind == "gpu", data.kind == "preference"
    length = size.length if size else min(model.positions, 1024 if on_gpu else 256)
    # An epoch should have at least sixteen updates. A token has about four bytes; each pair of answers is a sample.
    sample_bytes = PAIR_BYTES if is_dpo else 4 * length
    samples = float("inf") if data.bytes is None else data.bytes / sample_bytes
    most = 32 if on_gpu else 8
    batch = max(1, min(most, _power(samples / 16)) // device.count)
    micro = min(batch, _power(_row(MICRO_TOKENS, model.parameters)[1] / length)) if on_gpu else batch
    rate = size.rate if size else _row(RATES, model.parameters)[2 if start.lora else 1]
    document: dict[str, Any] = {
        "train_batch_size": batch // micro * micro * device.count,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 1.0,
    }
    if device.precision is not None:
        document[device.precision] = {"enabled": True}
    document["zero_optimization"] = _layout(start)
    if on_gpu and model.parameters >= 1e9:
        document["activation_checkpointing"] = {"enabled": True}
    params = {"lr": float(f"{rate * (PREFERENCE_RATE if is_dpo else 1):.3g}"), "weight_decay": 0.1 if size else 0.0}
    document["optimizer"] = {"type": "AdamW", "params": params}
    document["scheduler"] = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 20 if size else 10}}
    if size:
        sizes = {"hidden_size": size.hidden, "layers": size.layers, "heads": size.heads}
        document["model"] = {"architecture": "llama", **sizes, "sequence_length": length, "tie_embeddings": True}
    else:
        document["huggingface"] = {"path": model.name, "sequence_length": length}
    if start.lora:
        document["lora"] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    if is_dpo:
        document["dpo"] = {"beta": 0.1}
    document["data"] = {"train": data.source, "validation_fraction": 0.05, "too_long": "truncate"}
    document["checkpoint"] = {"keep_last": 2}
    document["run"] = {
        **({"steps": size.steps} if size else {"epochs": 1 if is_dpo else 3}),
        "ranks": device.count,
        "output": start.output,
        "evaluate_every": 50,
        "save_every": 100,
    }
    return document


def _layout(start: Start) -> dict[str, Any]:
    device, parameters = start.device, start.model.parameters
    for stage, offload, trained, adapted in LAYOUTS:
        bytes_each = (adapted if start.lora else trained)(device.count) * parameters
        # One device has nothing to divide, and a CPU nothing to hold its states for it.
        if stage < 3 and (stage == 0) != (device.count == 1):
            continue
        if bytes_each <= STATES * device.bytes or device.kind == "cpu":
            return {"stage": stage, **offload}
    raise AssertionError("the last row takes no memory")


def _row(table: tuple[tuple[float, ...], ...], parameters: float) -> tuple[float, ...]:
    return next(row for row in table if parameters <= row[0])


def _power(number: float) -> int:
    """Return the largest power of two up to a number, at least 1 and at most 2**20."""
    return 1 << max(0, int(min(number, 2**20)).bit_length() - 1)


# Of a configuration's keys.
COMMENTS = json.loads(Path(__file__).with_name("starting_comments.json").read_text(encoding="utf-8"))


def summary_of(start: Start) -> str:
    """Return what a configuration trains, for people."""
    model, device = start.model, start.device
    way = "DPO, " if start.data.kind == "preference" else ""
    way += "from scratch" if model.size else "LoRA" if start.lora else "all weights"
    devices = "the CPU" if device.kind == "cpu" else counted(device.count, "GPU")
    devices += "" if device.here else f" of {bytes_text(device.bytes)}"
    return f"{model.name} (about {scaled_text(model.parameters)} parameters), {way}, on {devices}"


def commented(document: Mapping[str, Any], title: str) -> str:
    """Return a configuration as YAML, a line for each key, with comments; ``title`` is the first."""
    lines = [f"{key}: {_flow(value)}" for key, value in document.items() if key != "run"]
    paths = [key for key in document if key != "run"]
    lines += ["run:", *(f"  {key}: {_flow(value)}" for key, value in document["run"].items())]
    paths += ["run", *(f"run.{key}" for key in document["run"])]
    rows = [
        f"{line:<62} # {COMMENTS[path]}" if path in COMMENTS else line for path, line in zip(paths, lines, strict=True)
    ]
    return "\n".join([f"# {title}", *rows]) + "\n"


WORD = re.compile(r"(?!(?:true|false|null)\b)[A-Za-z][\w./-]*", re.IGNORECASE)


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    # JSON is YAML, too, so what is no plain word is written as JSON.
    return value if isinstance(value, str) and WORD.fullmatch(value) else json.dumps(value, ensure_ascii=False)
