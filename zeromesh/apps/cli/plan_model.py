"""The model that ``zeromesh plan`` is asked about: a name, sizes, a folder of transformers, or a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zeromesh.apps.plan.choose.space import ModelLimits
from zeromesh.apps.plan.cost.cost import CostSource
from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.apps.plan.cost.models import MODELS, limits_of, limits_of_decoder, shape_named
from zeromesh.apps.plan.cost.packed import packing_of
from zeromesh.apps.plan.cost.passes import TraceOptions
from zeromesh.apps.plan.cost.shape import TransformerCost
from zeromesh.apps.plan.cost.source import configuration_of, hugging_face_cost, limits_of_configuration, token_inputs
from zeromesh.apps.train.train_settings import Quantization, TrainSettings
from zeromesh.base.files import read_text
from zeromesh.base.words import nearest
from zeromesh.checkpoint.weights.hub_models import is_model_id, model_folder
from zeromesh.checkpoint.weights.pretrained import saved_quantization
from zeromesh.config.document import read_object
from zeromesh.config.written import completed_document
from zeromesh.engine.initialize.widths import tables_of
from zeromesh.shard.sizes import TableLayout

TRAIN = "-m zeromesh.apps.cli.main train"
SCRIPT = "train.py"  # of the user, with the five lines of the README


@dataclass(frozen=True)
class AskedModel:
    """A model, and what its file says of a run."""

    source: CostSource
    limits: ModelLimits
    batch: int | None = None
    sequence: int | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)  # document that it comes from
    folder: str = ""  # of a model of transformers
    tables: TableLayout = field(default_factory=TableLayout)

    @property
    def program(self) -> str:
        """The program that trains it, for ``zeromesh launch``."""
        keys = {*self.configuration}
        return TRAIN if keys & {"model", "huggingface"} and keys >= {"data", "run"} else SCRIPT

    def document(self, planned: Mapping[str, Any], sequence: int) -> dict[str, Any]:
        """Return a plan's document with all that the model's own says."""
        if self.configuration:
            return completed_document(self.configuration, planned)
        model = {"huggingface": {"path": self.folder, "sequence_length": sequence}} if self.folder else {}
        return {**planned, **model}


def asked_model(text: str, precision: str) -> AskedModel:
    """Return the model of a command line.

    Raises:
        ValueError: no such name, file or sizes, or a model that transformers does not know or that cannot be fetched.
    """
    shape = shape_named(text)
    if shape is not None and not Path(text).exists():
        return AskedModel(TransformerCost(shape), limits_of(shape))
    path = model_folder(text, weights=False)
    if not path.exists():
        close = nearest(text, MODELS)
        meant = f"did you mean {close}? " if close else ""
        raise ValueError(
            f"{text!r} is no file, folder or known model; {meant}Give one of {', '.join(MODELS)}, a size such as 7b, "
            "sizes such as llama:layers=32,hidden=4096,heads=32, a folder with a config.json of transformers, or a "
            "configuration of ZeroMesh"
        )
    if path.is_file() and not _of_transformers(path):
        return _configured(path, precision)
    limits = limits_of_configuration(configuration_of(path))
    folder = path if path.is_dir() else path.parent
    named = text if is_model_id(text) else str(folder)
    return AskedModel(hugging_face_cost(path, TraceOptions(DTYPES[precision])), limits, folder=named)


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
    options = TraceOptions(DTYPES[precision], tables=settings.embedding_tables.modules)
    document, tables = read_object(path), tables_of(settings)
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
        return AskedModel(cost, limits, settings.train_batch_size, chosen.sequence_length, document, tables=tables)
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
    return AskedModel(source, limits, settings.train_batch_size, shape.sequence_length, document, tables=tables)
