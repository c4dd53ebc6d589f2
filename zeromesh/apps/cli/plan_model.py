"""The model that ``zeromesh plan`` is asked about: a name, sizes, a folder of transformers, or a configuration."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.apps.plan.choose.space import ModelLimits
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.apps.plan.cost.models import limits_of, limits_of_decoder, shape_named
from zeromesh.apps.plan.cost.named_models import CatalogueModel, close_names, find_model
from zeromesh.apps.plan.cost.packed import packing_of
from zeromesh.apps.plan.cost.passes import WHOLE_SEQUENCES, TokenTiles, TraceOptions
from zeromesh.apps.plan.cost.sdxl_unet import SdxlUnet, unet_inputs
from zeromesh.apps.plan.cost.shape import TransformerCost, TransformerShape
from zeromesh.apps.plan.cost.source import (
    CONFIG,
    class_of,
    configuration_of,
    hugging_face_cost,
    limits_of_configuration,
    token_inputs,
)
from zeromesh.apps.plan.machine.here import tiles_of
from zeromesh.apps.train.train_settings import HuggingFace, Lora, Quantization, TrainSettings
from zeromesh.base.files import read_text
from zeromesh.base.requirements import pip_install
from zeromesh.checkpoint.weights.hub_models import is_model_id, model_folder
from zeromesh.checkpoint.weights.pretrained import saved_quantization
from zeromesh.config.document import read_object
from zeromesh.config.written import completed_document
from zeromesh.engine.initialize.widths import resting_of, tables_of
from zeromesh.shard.sizes import TableLayout

TRAIN = "-m zeromesh.apps.cli.main train"
SCRIPT = "train.py"  # of the user, with the five lines of the README
YOUR_MODEL = "your-model"  # folder in a written configuration, where the plan knows sizes only
CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of names of classes of language models


@dataclass(frozen=True)
class Adapters:
    """Adapters on all linear layers of a language model, whose own weights are frozen."""

    rank: int
    quantized: bool = False  # frozen weights in 4 bits, as bitsandbytes keeps them

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{'QLoRA' if self.quantized else 'LoRA'} (r = {self.rank})"

    @property
    def section(self) -> dict[str, Any]:
        """The section ``lora`` of a configuration."""
        return {"r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": "all-linear"}

    def add(self, model: nn.Module) -> nn.Module:
        """Return a model with the adapters of ``zeromesh train``."""
        # Imported late: a model by its name needs nothing that trains.
        from zeromesh.apps.train.model import Transformer

        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that no plan runs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what PEFT calls
            return Transformer(HuggingFace(path="", sequence_length=1), Lora(**self.section)).adapted(model)


@dataclass(frozen=True)
class AskedModel:
    """A model, and what its file says of a run."""

    source: CostSource
    limits: ModelLimits
    batch: int | None = None
    sequence: int | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)  # document that it comes from
    folder: str = ""  # of a model of transformers, or its name on the Hub
    tables: TableLayout = field(default_factory=TableLayout)
    resting: TableLayout | None = None  # place of experts that rest
    adapters: Adapters | None = None
    causal: bool = True  # a language model, which can have adapters
    images: bool = False  # samples have no tokens
    chain: bool = True  # its blocks are one chain, which pipeline stages can divide

    @property
    def program(self) -> str:
        """The program that trains it, for ``zeromesh launch``."""
        keys = {*self.configuration}
        return TRAIN if keys & {"model", "huggingface"} and keys >= {"data", "run"} else SCRIPT

    def document(self, planned: Mapping[str, Any], sequence: int) -> dict[str, Any]:
        """Return a plan's document with all that the model's own says."""
        if self.configuration:
            return completed_document(self.configuration, planned)
        if not self.folder and self.adapters is None:
            return dict(planned)
        model: dict[str, Any] = {"path": self.folder or YOUR_MODEL, "sequence_length": sequence}
        if self.adapters is None:
            return {**planned, "huggingface": model}
        if self.adapters.quantized:
            model["quantization"] = {"bits": 4, "type": "nf4", "double": True}
        return {**planned, "huggingface": model, "lora": self.adapters.section}


def asked_model(
    text: str, precision: str, adapters: Adapters | None = None, tiles: TokenTiles = WHOLE_SEQUENCES
) -> AskedModel:
    """Return the model of a command line.

    Raises:
        ValueError: no such name, file or sizes, a model that transformers does not know or that cannot be fetched, one
            that cannot have adapters, or tiles over tokens of sizes alone.
    """
    options = TraceOptions(DTYPES[precision], tiles=tiles)
    if not Path(text).expanduser().exists():
        if (model := find_model(text)) is not None:
            return _of_catalogue(model, options, adapters)
        if (shape := shape_named(text)) is not None:
            return _of_shape(shape, options, adapters)
    close = close_names(text)
    try:
        path = model_folder(text, weights=False)
    except ValueError as error:
        if close:
            error.add_note(f"names that need no network: {', '.join(close)}; zeromesh plan --list shows all")
        raise
    if not path.exists():
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        size = f"did you mean {text}b? " if re.fullmatch(r"\d+(\.\d+)?", text) else meant
        hint = f"; {size}" if size else ". "
        raise ValueError(
            f"{text!r} is no file, folder or known model{hint}Give a name that zeromesh plan --list shows, a size "
            "such as 7b, sizes such as llama:layers=32,hidden=4096,heads=32, a folder with a config.json of "
            "transformers, or a configuration of ZeroMesh"
        )
    if path.is_file() and not _of_transformers(path):
        if adapters is not None:
            raise ValueError(
                f"{text} says itself whether it trains adapters; leave out --lora and --qlora, and set lora and "
                "huggingface.quantization in the file"
            )
        return _configured(path, precision)
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        documents = sorted(file.name for file in folder.glob("*.json"))[:3]
        beside = f"; it has {', '.join(documents)}: name that file if it is a configuration" if documents else ""
        raise ValueError(
            f"the folder {text!r} has no {CONFIG}, which says what the model is; give the folder of a model of "
            f"transformers, or a name that zeromesh plan --list shows{beside}"
        )
    config = configuration_of(path)
    named = text if is_model_id(text) else str(folder)
    asked = _of_configuration(path, config, options, adapters, text)
    return replace(asked, folder=named)


def _of_configuration(
    source: Any, config: Any, options: TraceOptions, adapters: Adapters | None, text: str
) -> AskedModel:
    """Return a model of transformers, with adapters if there are any."""
    kind = class_of(config)
    causal = kind.__name__.endswith(CAUSAL)
    if adapters is not None and not causal:
        raise ValueError(
            f"--lora and --qlora are for language models, and {text} is a {kind.__name__}; leave them out, or name a "
            "language model such as llama-3.1-8b"
        )
    limits = limits_of_configuration(config)
    if adapters is not None and adapters.quantized:
        assert options.dtype is not None
        options = replace(options, packing=packing_of(Quantization(), options.dtype.itemsize))
        limits = replace(limits, heads=0, kv_heads=0)  # no tensor ranks
    adapt = adapters.add if adapters is not None else lambda model: model
    cost = hugging_face_cost(source, options, adapt=adapt)
    images = getattr(kind, "main_input_name", "") == "pixel_values"
    chain = not config.is_encoder_decoder and getattr(config, "num_hidden_layers", None) is not None
    return AskedModel(cost, limits, adapters=adapters, causal=causal, images=images, chain=chain)


def _of_catalogue(model: CatalogueModel, options: TraceOptions, adapters: Adapters | None) -> AskedModel:
    if adapters is not None and not model.causal:
        raise ValueError(
            f"--lora and --qlora are for language models, and {model.name} is a {model.kind}; leave them out, or name "
            "a language model such as llama-3.1-8b"
        )
    if not model.model_type:

        def make() -> nn.Module:
            with torch.device("meta"):
                return SdxlUnet()

        cost = TracedCost(make, unet_inputs, options, name=model.name)
        return AskedModel(cost, ModelLimits(causal=False), causal=False, images=True, chain=False)
    if find_spec("transformers") is None:
        shape = model.shape()
        if shape is None or adapters is not None:
            raise ValueError(
                f"{model.name} is built with transformers, and adapters with PEFT: "
                + pip_install("transformers", "peft")
            )
        return replace(_of_sizes(shape, options), folder=model.hub if model.causal else "")
    config = model.configuration()
    asked = _of_configuration(config, config, options, adapters, model.name)
    return replace(asked, folder=model.hub if model.causal else "", images=model.images)


def _of_shape(shape: TransformerShape, options: TraceOptions, adapters: Adapters | None) -> AskedModel:
    """Return a model of sizes; adapters are added to the model of transformers that has them."""
    if adapters is None:
        return _of_sizes(shape, options)
    others = shape.shared_width or shape.dense_layers or shape.window or shape.extra_heads
    if not shape.gated or shape.biases or others or find_spec("transformers") is None:
        raise ValueError(
            f"adapters on {shape.name} cannot be planned: sizes stand for a Llama or a Mixtral, which need "
            f"transformers and PEFT ({pip_install('transformers', 'peft')}), or name a model that zeromesh plan --list "
            "shows"
        )
    import transformers

    kind, experts = "Llama", {}
    if shape.experts:
        kind, experts = "Mixtral", {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen}
    config = getattr(transformers, f"{kind}Config")(
        **experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.expert_width if shape.experts else shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        head_dim=shape.head_width or shape.hidden // shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions or 1 << 26,
        tie_word_embeddings=shape.tied,
        architectures=[f"{kind}ForCausalLM"],
    )
    config.name_or_path = shape.name
    return _of_configuration(config, config, options, adapters, shape.name)


def _of_sizes(shape: TransformerShape, options: TraceOptions) -> AskedModel:
    """Return a model whose cost is a formula of its sizes; raise ValueError for tiles, which no formula has."""
    if options.tiles != WHOLE_SEQUENCES:
        raise ValueError(
            f"tiling and chunked_loss of {shape.name} cannot be planned: its cost is a formula of its sizes; install "
            "transformers and name a model that zeromesh plan --list shows, or leave them out of the file"
        )
    return AskedModel(TransformerCost(shape), limits_of(shape), causal=limits_of(shape).causal)


def _of_transformers(path: Path) -> bool:
    """Return whether a JSON file describes a model of transformers."""
    try:
        document = json.loads(read_text(path, "utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False  # reading it as a configuration says what is wrong with it
    return isinstance(document, dict) and "model_type" in document


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _saved(described: Any) -> Quantization | None:
    """Return how the weights of a folder are quantized; None: they are not."""
    saved = saved_quantization(described)
    if saved is None or saved.load_in_8bit:
        return saved and Quantization(bits=8)
    return Quantization(type=saved.bnb_4bit_quant_type, double=saved.bnb_4bit_use_double_quant)


def _configured(path: Path, precision: str) -> AskedModel:
    """Return the model of a configuration, with its batch and its sequence."""
    # Imported late: a model by its name needs nothing that trains.
    from zeromesh.apps.train.model import Transformer, language_model

    settings = TrainSettings.load(path)
    tables_named = settings.embedding_tables.modules
    options = TraceOptions(DTYPES[precision], tables=tables_named, tiles=tiles_of(settings))
    document = read_object(path)
    placed: dict[str, Any] = {"tables": tables_of(settings), "resting": resting_of(settings)}
    if settings.huggingface is not None:
        chosen = settings.huggingface
        folder = model_folder(chosen.path, weights=False, revision=chosen.revision)
        described = configuration_of(folder)
        limits = limits_of_configuration(described)
        if (quantization := chosen.quantization or _saved(described)) is not None:
            options = replace(options, packing=packing_of(quantization, DTYPES[precision].itemsize))
            limits = replace(limits, heads=0, kv_heads=0)  # no tensor ranks
        adapt = Transformer(chosen, settings.lora).adapted
        cost = hugging_face_cost(folder, options, attention=chosen.attention or "", adapt=adapt)
        return AskedModel(cost, limits, settings.train_batch_size, chosen.sequence_length, document, **placed)
    if settings.model is None:
        raise ValueError(
            f"{str(path)!r} describes no model: it has neither a section 'model' nor 'huggingface'; name the model "
            "first, and the file with --explain"
        )
    shape = settings.model
    if shape.vocab_size is None:  # of a tokenizer that is trained later
        size = settings.data.vocabulary_size if settings.data is not None else 4096
        shape = shape.model_copy(update={"vocab_size": size})
    language = language_model(settings.model_copy(update={"model": shape}))
    built = language.build()
    source = TracedCost(lambda: built, token_inputs("tokens"), options, name=shape.architecture)
    limits = limits_of_decoder(shape)
    return AskedModel(source, limits, settings.train_batch_size, shape.sequence_length, document, **placed)
