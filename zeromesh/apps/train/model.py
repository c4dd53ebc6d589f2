"""Models of ``zeromesh train``: a built-in decoder, or a model of transformers, perhaps with adapters."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeromesh
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.architectures.flops import training_cost, training_flops_per_token
from zeromesh.apps.train.data.ordered_loader import Batch
from zeromesh.apps.train.data.tokenizer import load_tokenizer
from zeromesh.apps.train.run_example import tokens_without_values
from zeromesh.apps.train.train_settings import GROUP, HuggingFace, Lora, ModelShape, Quantization, TrainSettings
from zeromesh.base.files import read_text
from zeromesh.base.lengths import positions
from zeromesh.base.quantized_layers import is_quantized, plain_parameter
from zeromesh.base.requirements import imported
from zeromesh.base.words import nearest, some
from zeromesh.checkpoint.weights.pretrained import build, configuration, is_model_id, model_folder, saved_quantization
from zeromesh.checkpoint.weights.quantize_weights import require_library


@dataclass(frozen=True)
class BuiltIn:
    """Description of a ``Decoder``."""

    shape: ModelShape
    section = "model"
    tokenizer = None
    origin = None

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.shape.sequence_length

    @property
    def name(self) -> str:
        """Name of the architecture."""
        return self.shape.architecture

    @property
    def vocabulary(self) -> int | None:
        """Number of entries of the vocabulary; None if the tokenizer decides."""
        return self.shape.vocab_size

    def build(self) -> nn.Module:
        """Return the model for ``zeromesh.initialize``; no rank allocates all of it."""
        with zeromesh.zero.Init():
            return Decoder(self.shape)

    def cost(self, model: nn.Module) -> float:
        """Return the operations of forward and backward per token, for the model that was built."""
        return training_flops_per_token(self.shape)

    def logits(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """Call the model, or its engine, and return the logits, shape ``(rows, length, vocabulary)``."""
        logits: torch.Tensor = model(batch.tokens, positions=batch.positions, documents=batch.documents)
        return logits


@dataclass(frozen=True)
class Transformer:
    """Description of a causal model of transformers, with the same names as ``BuiltIn``."""

    source: HuggingFace
    lora: Lora | None = None
    dtype: torch.dtype = torch.float32  # of the computation, which quantized weights stand for
    section = "huggingface"

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.source.sequence_length

    @property
    def name(self) -> str:
        """Name of the architecture."""
        try:
            config = json.loads(read_text(self.folder / "config.json"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"huggingface.path = {str(self.folder)!r} has no readable config.json: {error}") from None
        return str((config.get("architectures") or [self.folder.name])[0])

    @property
    def folder(self) -> Path:
        """Folder of the model; of one of the Hub, that in the cache."""
        # Absolute, because adapters name it and can be moved.
        try:
            return model_folder(self.source.path, self.source.weights is not False, self.source.revision).absolute()
        except ValueError as error:
            raise ValueError(f"huggingface.path: {error}") from None

    @property
    def origin(self) -> str | None:
        """Name and commit of a model of the Hub; None for one of a folder."""
        # The Hub's cache has a folder for each commit.
        cached = is_model_id(self.source.path) and self.folder.parent.name == "snapshots"
        return f"{self.source.path}@{self.folder.name}" if cached else None

    @property
    def tokenizer(self) -> str | None:
        """Folder of the model's own tokenizer; None if it has none."""
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
        path = str(self.folder) if is_model_id(self.source.path) else self.source.path
        return path if any((self.folder / name).is_file() for name in names) else None

    @property
    def has_weights(self) -> bool:
        """True if the weights in the folder are used."""
        if self.source.weights is not None:
            return self.source.weights
        # Pickles are not read, but count here: an error about them is better than a model with initial weights.
        return any(any(self.folder.glob(pattern)) for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin"))

    @property
    def vocabulary(self) -> int:
        """Number of entries of the vocabulary."""
        with self._explained():
            return int(configuration(self.folder)[0].get_text_config().vocab_size)

    @property
    def quantized(self) -> bool:
        """True if linear layers have frozen weights in few bits, which are made here or are in the folder."""
        with self._explained():
            quantizes = self.source.quantization is not None
            return quantizes or saved_quantization(configuration(self.folder)[0]) is not None

    @property
    def _options(self) -> dict[str, Any]:
        return {} if self.source.attention is None else {"attn_implementation": self.source.attention}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the keys of the configuration to errors about the folder."""
        try:
            yield
        except (ValueError, ImportError) as error:
            attention = self.source.attention
            beside = "" if attention is None else f" with huggingface.attention = {attention!r}"
            raise ValueError(f"huggingface.path = {self.source.path!r}{beside}: {error}") from None

    def unfilled(self, dtype: torch.dtype) -> nn.Module:
        """Return the model without values of its parameters."""
        quiet()
        with self._explained():
            model = build(self.folder, None, dtype, draws=False, **self._options)
        return self.adapted(model)

    def adapted(self, model: nn.Module) -> nn.Module:
        """Return a model with the adapters of the configuration, if it has any."""
        return model if self.lora is None else _with_adapters(model, self.lora)

    def build(self) -> nn.Module:
        """Return the model for ``zeromesh.initialize``; no rank allocates all of it."""
        quiet()
        quantized = self.quantized
        with self._explained():
            options = self._options
            if quantized:
                # DoRA's magnitudes are made of the weights' values.
                options |= {"dtype": self.dtype, "deferred": self.lora is None or not self.lora.use_dora}
            if self.source.quantization is not None:
                options["quantization_config"] = quantization_config(self.source.quantization, self.dtype)
                options["quantize_experts"] = self.source.quantization.stacked
            model = zeromesh.from_pretrained(self.folder, weights=self.has_weights, **options)
        if is_model_id(self.source.path):
            model.name_or_path = self.source.path  # adapters name their model so, and not by a folder of the cache
        # Adapters alone could not make sense of weights that were drawn at random.
        if self.lora is not None and not self.has_weights:
            raise ValueError(
                f"lora adapts the weights of a model, and huggingface.path = {self.source.path!r} gives none, or "
                "huggingface.weights leaves them out; choose one with weights, or leave lora out"
            )
        longest = positions(model.config.get_text_config())
        if longest is not None and self.sequence_length > longest:
            raise ValueError(
                f"huggingface.sequence_length = {self.sequence_length} is longer than the {longest} positions of the "
                f"model in huggingface.path = {self.source.path!r}; set it to {longest} or less"
            )
        return self.adapted(model)

    def require_tokenizer(self, named: str | None, size: int) -> None:
        """Refuse a tokenizer that the weights were not trained with; ``named`` is None for one that the run trained."""
        if not self.has_weights:
            return
        path = self.tokenizer
        if named is None:
            raise ValueError(
                f"the weights in huggingface.path = {self.source.path!r} know the ids of their own tokenizer, which "
                "is not there; name it in data.tokenizer, or set huggingface.weights to false"
            )
        # A copy of the model's tokenizer in another folder has the same size, and is let through.
        if path is not None and Path(named) != Path(path) and (entries := load_tokenizer(Path(path)).size) != size:
            raise ValueError(
                f"data.tokenizer = {named!r} has {size} entries, and the model's own in {path!r} has {entries}; "
                "leave data.tokenizer out, or set huggingface.weights to false"
            )

    def cost(self, model: nn.Module) -> float:
        """Return the operations of forward and backward per token, for the model that was built."""
        length = self.sequence_length
        tokens = tokens_without_values(1, length)
        if self.quantized:  # counted on plain layers, which torch knows
            with torch.device("meta"):
                model = self.unfilled(self.dtype)
        # With a whole mask, the model does not read the tokens to find where documents begin.
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")
        return training_cost(model, {"input_ids": tokens, "attention_mask": mask, "use_cache": False}, length)

    def logits(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """Call the model, or its engine, and return the logits, shape ``(rows, length, vocabulary)``."""
        # Attention of transformers finds documents by positions that begin anew.
        positions = {} if batch.positions is None else {"position_ids": batch.positions}
        logits: torch.Tensor = model(input_ids=batch.tokens, use_cache=False, **positions).logits
        return logits


LanguageModel = BuiltIn | Transformer


def language_model(settings: TrainSettings) -> LanguageModel:
    """Return the model in the settings; raise ValueError if they have none."""
    if settings.huggingface is not None:
        return Transformer(settings.huggingface, settings.lora, settings.precision.compute or torch.float32)
    if settings.model is not None:
        return BuiltIn(settings.model)
    raise ValueError(
        "zeromesh train needs a section 'model', or 'huggingface' with the folder of a model; a file without them is "
        "for a script that calls zeromesh.initialize, as python examples/bert_mlm.py --config examples/bert.json"
    )


def quiet() -> None:
    """Turn off the progress bars of transformers, and its warnings about calls of PEFT."""
    # Imported late: transformers is not needed for a model of ours.
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def quantization_config(chosen: Quantization, dtype: torch.dtype) -> Any:
    """Return the configuration of transformers; raise ValueError if the library is not installed."""
    require_library(chosen.library)
    import transformers

    if chosen.library == "torchao":
        torchao: Any = import_module("torchao.quantization")
        group = torchao.granularity.PerGroup(GROUP)
        int4: torch.dtype = torch.int4  # type: ignore[attr-defined]
        kinds = {
            8: torchao.Int8WeightOnlyConfig(),
            4: torchao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=group),
        }
        return transformers.TorchAoConfig(kinds[chosen.bits])
    if chosen.bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=chosen.type or "nf4",
        bnb_4bit_use_double_quant=chosen.double is not False,
        bnb_4bit_compute_dtype=dtype,
    )


def parameter_groups(model: Any, settings: TrainSettings) -> list[dict[str, Any]] | None:
    """Return PEFT's groups of LoRA+, with learning rates of their own; None without ``lora.plus_ratio``."""
    if settings.lora is None or settings.lora.plus_ratio is None:
        return None
    assert settings.optimizer is not None
    from peft.optimizers import create_loraplus_optimizer

    params = settings.optimizer.params
    # An optimizer of no other use: PEFT has no function for the groups alone.
    groups = create_loraplus_optimizer(
        model,
        torch.optim.SGD,
        lr=float(params["lr"]),
        loraplus_lr_ratio=settings.lora.plus_ratio,
        loraplus_weight_decay=float(params.get("weight_decay", 0.0)),
    ).param_groups
    return [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups if group["params"]]


def _with_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    peft = imported("peft", "lora needs PEFT")
    _require_modules(model, lora)
    # PEFT takes lists of names, and this one name as a string only.
    options = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in lora.model_dump(exclude={"plus_ratio"}).items()
    }
    if lora.target_parameters and any(is_quantized(parameter) for parameter in model.parameters()):
        # PEFT knows parametrized weights by their whole names only.
        options["target_parameters"] = [p for end in lora.target_parameters for p in _ending(_stacked(model), end)]
    if options["target_modules"] == ["all-linear"]:
        options["target_modules"] = "all-linear"
    try:
        with zeromesh.zero.Init():
            adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    except ValueError as error:
        raise ValueError(f"lora.target_modules: {error}") from None
    return adapted


def _require_modules(model: nn.Module, lora: Lora) -> None:
    """Refuse names that no module has, or only modules that cannot have adapters."""
    # PEFT ignores such a name if another one has a module, and less would be trained than was asked for.
    modules = [(path, module) for path, module in model.named_modules() if path]
    kind = type(model).__name__
    for name in lora.target_modules or ():
        ends = [module for path, module in modules if path == name or path.endswith(f".{name}")]
        if name != "all-linear" and not any(isinstance(module, _TARGETS) or _is_linear(module) for module in ends):
            what = f"has no linear layer named {name!r}" if ends else f"has no module whose name ends in {name!r}"
            linear = {path.rpartition(".")[2] for path, module in modules if _is_linear(module)}
            raise ValueError(
                f"lora.target_modules: {kind} {what}{_offer(name, linear - {''})}, or all-linear for all but the output"
            )
    for name in lora.modules_to_save or ():
        if not any(path.endswith(name) for path, _ in modules):
            with_parameters = {
                path.rpartition(".")[2] for path, module in modules if [*module.parameters(recurse=False)]
            }
            raise ValueError(
                f"lora.modules_to_save: {kind} has no module whose name ends in {name!r}{_offer(name, with_parameters)}"
            )
    stacked = _stacked(model)
    for name in lora.target_parameters or ():
        if not _ending(stacked, name):
            kinds = {".".join(path.split(".")[-2:]) for path in stacked}
            raise ValueError(
                f"lora.target_parameters: {kind} has no stacked weight of three dims whose name ends in "
                f"{name!r}{_offer(name, kinds)}"
            )


def _stacked(model: nn.Module) -> list[str]:
    """Return the names of stacked weights, of which quantized ones are packed."""
    return [
        plain_parameter(model, name)
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 or (is_quantized(parameter) and name.endswith(".original"))
    ]


def _ending(names: Iterable[str], end: str) -> list[str]:
    return [name for name in names if name == end or name.endswith(f".{end}")]


# Beside linear layers, those for which PEFT has adapters.
_TARGETS = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # of GPT-2


def _offer(name: str, candidates: Iterable[str]) -> str:
    """Return a clause that offers names of layers, those first that are written like ``name``."""
    # Numbers are places in a list, which stand for another layer in each list.
    names = sorted(candidate for candidate in candidates if not candidate.isdecimal())
    names.sort(key=lambda other: -SequenceMatcher(None, name.lower(), other.lower()).ratio())
    similar = nearest(name, names)
    has = f"t has {some(names, most=12)}"
    return f"; did you mean {similar!r}? I{has}" if similar else f"; i{has}" if names else ""
