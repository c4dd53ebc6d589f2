"""Models of ``zeromesh train``: a built-in decoder, or a model of transformers, perhaps with adapters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import zeromesh
from zeromesh.batches import WithLoss
from zeromesh.config.errors import nearest
from zeromesh.config.settings import Settings
from zeromesh.config.train import HuggingFace, Lora, ModelShape
from zeromesh.engine import Engine
from zeromesh.export import plain_model
from zeromesh.model.lengths import positions
from zeromesh.pretrained import build, configuration
from zeromesh.train.architectures.decoder import Decoder
from zeromesh.train.architectures.flops import training_cost, training_flops_per_token
from zeromesh.train.data.loader import Batch
from zeromesh.train.data.tokenizer import load_tokenizer

PROBE = 4
"""Tokens of each of the two documents with which a model is tried."""


class LanguageModel(Protocol):
    """A model that predicts the next token."""

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""

    @property
    def name(self) -> str:
        """Its architecture."""

    @property
    def section(self) -> str:
        """Key of the configuration that describes the model."""

    @property
    def tokenizer(self) -> str | None:
        """Folder of the model's tokenizer; None if there is none."""

    @property
    def vocabulary(self) -> int | None:
        """Entries of its vocabulary; None if they follow from the tokenizer."""

    def build(self) -> nn.Module:
        """The model, as the engine takes it; nobody holds it whole."""

    def cost(self, model: nn.Module) -> float:
        """Operations of forward and backward for one token, of the model that was built."""

    def logits(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """Shape ``(rows, length, vocabulary)``; the engine may be called as the model."""


def language_model(settings: Settings) -> LanguageModel:
    """The one that the settings describe.

    Raises:
        ValueError: they describe none.
    """
    if settings.huggingface is not None:
        return Transformer(settings.huggingface, settings.lora)
    if settings.model is not None:
        return BuiltIn(settings.model)
    raise ValueError("zeromesh train needs a section 'model', or 'huggingface' with the folder of a model")


@dataclass(frozen=True)
class BuiltIn:
    """A ``Decoder``."""

    shape: ModelShape

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.shape.sequence_length

    @property
    def name(self) -> str:
        """Its architecture."""
        return self.shape.architecture

    @property
    def section(self) -> str:
        """Of the configuration."""
        return "model"

    @property
    def tokenizer(self) -> str | None:
        """None: one is trained."""
        return None

    @property
    def vocabulary(self) -> int | None:
        """Entries of its vocabulary; None if they follow from the tokenizer."""
        return self.shape.vocab_size

    def build(self) -> nn.Module:
        """The model with the weights that the seed gives."""
        with zeromesh.zero.Init():
            return Decoder(self.shape)

    def cost(self, model: nn.Module) -> float:
        """Operations per token by the formula."""
        return training_flops_per_token(self.shape)

    def logits(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """Shape ``(rows, length, vocabulary)``."""
        found: torch.Tensor = model(batch.tokens, positions=batch.positions, documents=batch.documents)
        return found


@dataclass(frozen=True)
class Transformer:
    """A causal model of transformers."""

    source: HuggingFace
    lora: Lora | None = None

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.source.sequence_length

    @property
    def name(self) -> str:
        """The class of transformers."""
        return _architecture(self.folder)

    @property
    def section(self) -> str:
        """Of the configuration."""
        return "huggingface"

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return Path(self.source.path).expanduser().absolute()  # adapters say what they are for, and are moved

    @property
    def tokenizer(self) -> str | None:
        """The folder, if it has one."""
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
        return self.source.path if any((self.folder / name).is_file() for name in names) else None

    @property
    def has_weights(self) -> bool:
        """True if the folder's weights are to be used."""
        if self.source.weights is not None:
            return self.source.weights
        # Pickles count: that they are not read is better said than shown by a model that starts from nothing.
        return any(any(self.folder.glob(pattern)) for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin"))

    @property
    def vocabulary(self) -> int | None:
        """Entries of its vocabulary."""
        with self._named():
            return int(configuration(self.folder)[0].get_text_config().vocab_size)

    @property
    def _options(self) -> dict[str, Any]:
        return {} if self.source.attention is None else {"attn_implementation": self.source.attention}

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Explain errors of the folder by the keys of the configuration."""
        try:
            yield
        except (ValueError, ImportError) as error:
            attention = self.source.attention
            beside = "" if attention is None else f" with huggingface.attention = {attention!r}"
            raise ValueError(f"huggingface.path = {self.source.path!r}{beside}: {error}") from None

    def unfilled(self, dtype: torch.dtype) -> nn.Module:
        """The model, whose parameters have no values yet."""
        quiet()
        with self._named():
            model = build(self.folder, None, dtype, draws=False, **self._options)
        return model if self.lora is None else _with_adapters(model, self.lora)

    def build(self) -> nn.Module:
        """The model.

        Raises:
            ValueError: it cannot be built, is not causal, has not enough positions, or cannot have the adapters.
        """
        quiet()
        with self._named():
            model = zeromesh.from_pretrained(self.folder, weights=self.has_weights, **self._options)
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
        return model if self.lora is None else _with_adapters(model, self.lora)

    def require_tokenizer(self, named: str | None, size: int) -> None:
        """Refuse a tokenizer that the weights were not trained with, as far as that can be told.

        Args:
            named: where it is; None if it was trained on the text.
            size: its entries.

        Raises:
            ValueError: it is another one than the model's.
        """
        if not self.has_weights:
            return
        own = self.tokenizer
        if named is None:
            raise ValueError(
                f"the weights in huggingface.path = {self.source.path!r} know the ids of their own tokenizer, which is "
                "not there; name it in data.tokenizer, or set huggingface.weights to false"
            )
        if own is not None and Path(named) != Path(own) and (entries := load_tokenizer(Path(own)).size) != size:
            raise ValueError(
                f"data.tokenizer = {named!r} has {size} entries, and the model's own in {own!r} has {entries}; leave "
                "data.tokenizer out, or set huggingface.weights to false"
            )

    def cost(self, model: nn.Module) -> float:
        """Counted, frozen parameters as what they cost."""
        length = self.sequence_length
        tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
        # With a whole mask the model does not look into the tokens for where documents begin.
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")
        return training_cost(
            model, {"input_ids": tokens, "attention_mask": mask, "use_cache": False}, length
        ).operations

    def logits(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """Shape ``(rows, length, vocabulary)``."""
        positions = {} if batch.positions is None else {"position_ids": batch.positions}
        found: torch.Tensor = model(input_ids=batch.tokens, use_cache=False, **positions).logits
        return found


def quiet() -> None:
    """Leave the terminal to us: transformers draws bars of its own, and warns of what PEFT asks it."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def _architecture(folder: Path) -> str:
    import json

    try:
        named = json.loads((folder / "config.json").read_text()).get("architectures") or [folder.name]
    except (OSError, ValueError) as error:
        raise ValueError(f"huggingface.path = {str(folder)!r} has no readable config.json: {error}") from None
    return str(named[0])


def _with_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"lora needs PEFT ({error}); pip install 'zeromesh[hf]'") from None
    _require_modules(model, lora)
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in lora.model_dump().items()}
    if given["target_modules"] == ["all-linear"]:
        given["target_modules"] = "all-linear"
    try:
        with zeromesh.zero.Init():
            adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **given))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"lora.target_modules: {error}") from None
    return adapted


def _require_modules(model: nn.Module, lora: Lora) -> None:
    """Refuse names that stand for no module: PEFT passes over them where others do."""
    paths = [path for path, _ in model.named_modules()]
    ends = sorted({path.rpartition(".")[2] for path in paths})
    for key, dot in (("target_modules", "."), ("modules_to_save", "")):
        for name in getattr(lora, key) or ():
            if name != "all-linear" and not any(path == name or path.endswith(dot + name) for path in paths):
                similar = nearest(name, ends)
                raise ValueError(
                    f"lora.{key}: {type(model).__name__} has no module whose name ends in {name!r}"
                    + (f"; did you mean {similar!r}?" if similar else f"; it has {', '.join(ends)}")
                )


@dataclass(frozen=True)
class _Trial(WithLoss):
    """Two rows of tokens, whose loss says whether the model predicts something else for one of them in some places."""

    batch: Batch
    language: LanguageModel
    places: slice

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """0 or 1."""
        logits = self.language.logits(model, self.batch)[:, self.places].float()
        same = torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-4)
        return torch.zeros((), device=logits.device) if same else torch.ones((), device=logits.device)

    def differs(self, engine: Engine) -> bool:
        """Return whether it does on some rank; all ranks call it."""
        return bool(engine.eval_batch(iter([self]), num_micro_batches=1))


def require_document_attention(engine: Engine, language: LanguageModel, vocabulary: int) -> None:
    """Try whether attention stays within documents: what is in the first must not matter in the second.

    All ranks call it. Rotary or learned positions alone do not show it, and not every model looks at them.

    Args:
        engine: of the model.
        language: how it is called.
        vocabulary: entries that it has.

    Raises:
        ValueError: the second document saw the first.
    """
    if (
        isinstance(language, Transformer)
        and "position_ids" not in inspect.signature(plain_model(engine.module).forward).parameters
    ):
        raise ValueError(_leaks(language))
    second = torch.arange(PROBE) % vocabulary
    rows = [torch.cat([torch.full((PROBE,), token), second]) for token in (0, vocabulary - 1)]
    tokens = torch.stack(rows)
    documents = torch.tensor([0] * PROBE + [1] * PROBE).expand_as(tokens)
    positions = torch.arange(PROBE).repeat(2).expand_as(tokens)
    trial = _Trial(Batch(tokens, tokens, positions, documents), language, slice(PROBE, None))
    if trial.differs(engine):
        raise ValueError(_leaks(language))


def require_causal(engine: Engine, language: LanguageModel, vocabulary: int) -> None:
    """Try whether a token matters to what is predicted before it. All ranks call it.

    Raises:
        ValueError: it does, as in BERT: the model would learn to copy its labels.
    """
    tokens = torch.stack([torch.arange(PROBE) % vocabulary] * 2)
    tokens[1, -1] = vocabulary - 1 - tokens[1, -1]
    spread = engine.context_parallel
    with nullcontext() if spread is None else spread.paused():  # so few tokens may be too few
        differs = _Trial(Batch(tokens, tokens), language, slice(-1)).differs(engine)
    if differs:
        raise ValueError(
            f"huggingface.path: {language.name} is no causal model: what it predicts depends on later tokens; choose a "
            "model that generates text (examples/bert_mlm.py trains on masked tokens)"
        )


def _leaks(language: LanguageModel) -> str:
    return (
        f"data.document_attention: {language.name} attends across documents whatever positions it is given; set it to "
        'false, and data.packing to "pad" where records must not see each other'
    )
