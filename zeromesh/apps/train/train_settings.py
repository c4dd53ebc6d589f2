"""Settings of ``zeromesh train``: those of the engine, and sections for the model, the text and the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ValidationError, field_validator, model_validator

from zeromesh.base.words import show
from zeromesh.config.batch_sizes import divisors_of
from zeromesh.config.refusals import Refusal
from zeromesh.config.section import CountFloat, CountInt, Int, Names, PositiveFloat, PositiveInt, Section, SizeInt, key
from zeromesh.config.settings import Resolved, Settings


class ModelShape(Section):
    """The built-in language model of zeromesh train."""

    architecture: Literal["gpt", "llama"] = key("gpt", "Architecture of the model.")
    vocab_size: SizeInt | None = key(None, 'Size of the vocabulary. Null or "auto": that of the tokenizer.')
    hidden_size: SizeInt = key(..., "Size of the hidden state. A multiple of heads.")
    layers: PositiveInt = key(..., "Number of blocks.", le=10_000)
    heads: SizeInt = key(..., "Number of attention heads.")
    kv_heads: SizeInt | None = key(
        None, "Number of key and value heads, a divisor of heads. Null: the same as heads. Llama only."
    )
    mlp_size: SizeInt | None = key(None, "Hidden size of the MLP. Null: the usual one of the architecture.")
    sequence_length: SizeInt = key(..., "Tokens per sample.")
    dropout: CountFloat = key(0.0, "Dropout probability.", lt=1)
    tie_embeddings: bool | None = key(
        None, "Use the embedding as the output matrix. Null: true for gpt, false for llama."
    )
    rope_theta: PositiveFloat = key(10000.0, "Base of the rotary position embedding. Llama only.")
    norm_eps: PositiveFloat = key(1e-5, "Number that normalization layers add to the variance.")
    initializer_range: PositiveFloat = key(0.02, "Standard deviation of the initial weights.")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        # Here and not in the model, so that a file is refused with both keys before anything is built.
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} must be a multiple of heads = {self.heads}; the nearest are "
                f"{self.hidden_size // self.heads * self.heads or self.heads} and "
                f"{(self.hidden_size // self.heads + 1) * self.heads}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            divisors = divisors_of(self.heads)
            raise ValueError(
                f"kv_heads = {self.kv_heads} must be a divisor of heads = {self.heads}; choose one of {divisors}"
            )
        return self


GROUP = 32  # weights of torchao in 4 bits that share a scale; divides the width of most models


class Quantization(Section):
    """Frozen weights in few bits, on which adapters are trained (QLoRA)."""

    library: Literal["bitsandbytes", "torchao"] = key(
        "bitsandbytes", "Library that quantizes the weights and computes with them."
    )
    bits: Literal[4, 8] = key(4, "Bits per weight. torchao stores 4 bits in a byte.")
    type: Literal["nf4", "fp4"] | None = key(None, "4-bit format of bitsandbytes. Null: nf4.")
    double: bool | None = key(None, "Also quantize the scales of 4-bit bitsandbytes weights. Null: true.")

    experts: bool | None = key(
        None, "Also quantize stacked weights of experts, in 4 bits of bitsandbytes. Null: true there."
    )

    @property
    def stacked(self) -> bool:
        """True if stacked weights of experts are quantized."""
        return self.experts is not False and (self.library, self.bits) == ("bitsandbytes", 4)

    @model_validator(mode="after")
    def _library_has_it(self) -> Self:
        names = [name for name in ("type", "double") if getattr(self, name) is not None]
        names += ["experts"] if self.experts else []
        if names and (self.library, self.bits) != ("bitsandbytes", 4):
            raise ValueError(
                f"{' and '.join(names)} is for 4 bits of bitsandbytes, and this is {self.bits} bits of {self.library}; "
                "leave it out"
            )
        return self


class HuggingFace(Section):
    """A causal language model of transformers, used instead of the section model."""

    path: str = key(
        ..., "Folder with config.json and, optionally, safetensors weights; or a name on the Hugging Face Hub."
    )
    # Null follows the folder, so that a config.json alone starts from the beginning.
    weights: bool | None = key(
        None, "Start from the weights. Null: if the folder has any; always for names on the Hub."
    )
    revision: str = key("main", "Branch, tag or commit of a model on the Hub.", min_length=1)
    sequence_length: PositiveInt = key(..., "Tokens per sample. At most the number of positions of the model.")
    attention: str | None = key(
        None, "Attention implementation of transformers, such as sdpa. Null: the default of transformers."
    )
    quantization: Quantization | None = key(None, "QLoRA: keep frozen weights in 4 or 8 bits. Needs the section lora.")


class Lora(Section):
    """Low-rank adapters of PEFT, with its names and defaults. All other parameters are frozen."""

    r: PositiveInt = key(8, "Rank of the adapters.")
    lora_alpha: PositiveInt = key(8, "Scale of the adapters: they are multiplied by lora_alpha / r.")
    lora_dropout: CountFloat = key(0.0, "Dropout probability of the inputs of adapters.", lt=1)
    target_modules: Names | None = key(
        None, "Modules with adapters: ends of their names, or all-linear. Null: PEFT's default for the model."
    )
    target_parameters: Names | None = key(
        None, "Stacked weights of experts with adapters: ends of their names, such as mlp.experts.down_proj."
    )
    modules_to_save: Names | None = key(None, "Modules that are trained in full and saved with the adapters.")
    bias: Literal["none", "all", "lora_only"] = key("none", "Biases to train.")
    use_rslora: bool = key(False, "Multiply adapters by lora_alpha / sqrt(r) instead of lora_alpha / r.")
    use_dora: bool = key(False, "DoRA: adapt magnitudes and directions of weights separately.")
    plus_ratio: PositiveFloat | None = key(
        None, "LoRA+: learning rate of the adapters' B matrices, as a multiple of the optimizer's. Null: 1."
    )

    @model_validator(mode="after")
    def _peft_has_it(self) -> Self:
        names = [name for name in ("use_dora", "lora_dropout") if getattr(self, name)]
        if self.target_parameters and names:
            raise ValueError(
                f"target_parameters = {show(list(self.target_parameters))} with {' and '.join(names)}: PEFT adds the "
                "product of two small matrices to a stacked weight, without dropout and without magnitudes of DoRA; "
                f"leave {' and '.join(names)} out, or adapt only modules, with target_modules"
            )
        return self


class Preference(Section):
    """Direct preference optimization (DPO): learn from records which of two answers is the better one.

    The reference is the model at the start of the run. Its log-likelihoods of all answers are computed once, before
    the first step.
    """

    beta: PositiveFloat = key(0.1, "Weight of staying close to the reference.")
    label_smoothing: CountFloat = key(0.0, "Share of records whose chosen answer may be the worse one.", lt=0.5)


class WeightedSource(Section):
    """A part of a blend."""

    source: Names = key(..., "Files, folders or glob patterns, as in data.train.")
    weight: PositiveFloat = key(..., "Share of the samples, relative to the other weights.")


def _listed_sources(value: Any) -> Any:
    # One source stands for a list of one.
    return tuple(_source(entry) for entry in (value if isinstance(value, list | tuple) else [value]))


def _source(entry: Any) -> Any:
    # What is wrong with an entry is said here, or pydantic would say it of both forms.
    if isinstance(entry, str | WeightedSource):
        return entry
    if not isinstance(entry, dict):
        raise ValueError(f'{show(entry)} must be a string, or an object {{"source": ..., "weight": ...}}')
    try:
        return WeightedSource(**entry)
    except ValidationError as error:
        problems = "; ".join(f"{detail['loc'][0]}: {detail['msg'].lower()}" for detail in error.errors())
        raise ValueError(f'{show(entry)} must be {{"source": ..., "weight": ...}}: {problems}') from None


Sources = Annotated[
    tuple[str | WeightedSource, ...],
    BeforeValidator(_listed_sources, json_schema_input_type=str | list[str | WeightedSource]),
]


class TextData(Section):
    """The training data."""

    train: Sources = key(
        ...,
        "Sources: files, folders or glob patterns of text, JSON, JSON lines, CSV, TSV, Parquet, and data sets of "
        'Hugging Face or Megatron; names on the Hub, such as "org/name:config:split"; python-stdlib, the source of '
        'Python\'s standard library. For a blend, a list of {"source": ..., "weight": ...}.',
    )
    validation: Names | None = key(None, "Sources of held-out data. Null: a part of data.train is held out.")
    validation_fraction: CountFloat = key(0.02, "Share of the training data to hold out if validation is null.", lt=1)
    revision: str = key("main", "Branch, tag or commit of data sets on the Hub.", min_length=1)
    suffixes: Names = key((), "File extensions to use in folders, such as .txt. Empty: all files.")
    format: Literal["text", "response", "chat", "preference", "raw"] | None = key(
        None, "Kind of records. Null: found from the first record. raw: files are plain text, whatever they hold."
    )
    columns: Names = key((), "Names of the columns of CSV and TSV files without a header. Empty: the first row.")
    text_key: str = key("text", "Key of a record's text.")
    prompt_key: str = key("prompt", 'Key of a record\'s prompt. prompt: also "instruction", "question" or "input".')
    response_key: str | None = key(
        None,
        'Key of a record\'s response to the prompt. Null: "response" or "completion"; "output" or "response" of an '
        'instruction, "answer" of a question, "output" of an input.',
    )
    messages_key: str = key(
        "messages",
        "Key of a record's list of messages, each with role and content, or from and value. messages: also "
        '"conversations".',
    )
    too_long: Literal["error", "truncate", "drop"] = key("error", "Treatment of records that are longer than a sample.")
    packing: Literal["pack", "pad"] = key(
        "pack", "pack: fill each sample with whole records. pad: one record per sample, with padding."
    )
    document_attention: bool | None = key(None, "Attend only within documents. Null: true for packed records.")
    vocabulary_size: Int = key(
        4096, "Size of the vocabulary of a trained tokenizer. The default shrinks for short texts.", ge=257
    )
    tokenizer: str | None = key(
        None, "tokenizer.json of the tokenizers library, or folder of a transformers tokenizer. Null: train one."
    )

    @field_validator("train")
    @classmethod
    def _some_text(cls, sources: tuple[str | WeightedSource, ...]) -> tuple[str | WeightedSource, ...]:
        if not sources:
            raise ValueError("must name at least one file, folder or pattern; python-stdlib is on every machine")
        # A source without a weight would have a share that depends on the unit of the others.
        if len({isinstance(source, str) for source in sources}) > 1:
            raise ValueError("has sources with a weight and sources without; give all of them one, or none")
        return sources

    @property
    def blend(self) -> list[tuple[tuple[str, ...], float]]:
        """Data sets that samples are taken from: the sources of each, and its share; the shares add up to 1."""
        weighted = [source for source in self.train if not isinstance(source, str)]
        if not weighted:
            return [(tuple(source for source in self.train if isinstance(source, str)), 1.0)]
        total = sum(source.weight for source in weighted)
        return [(source.source, source.weight / total) for source in weighted]

    @property
    def names(self) -> list[str]:
        """All sources, those that are held out too."""
        return [*(name for names, _ in self.blend for name in names), *(self.validation or ())]


class SampleSettings(Section):
    """Texts to generate at the end of a run."""

    prompts: Names = key((), "Prompts to continue.")
    chat: bool = key(False, "Treat prompts as messages of a user, and generate the assistant's answer.")
    length: PositiveInt = key(200, "Number of tokens to generate for each.")
    temperature: CountFloat = key(0.8, "Sampling temperature. 0: always the most likely token.")


class EarlyStop(Section):
    """The end of a run whose evaluation loss falls no more."""

    patience: PositiveInt = key(3, "Evaluations in a row without a lower loss after which the run ends.")
    min_delta: CountFloat = key(0.0, "Nats per token by which a loss must be lower to count.")


class RunSettings(Section):
    """Length, ranks and output of a run of zeromesh train."""

    steps: PositiveInt | None = key(None, "Number of updates. Null: epochs decides.")
    epochs: PositiveFloat | None = key(None, "Passes over the training samples. Null: steps decides.", le=1e6)
    early_stop: EarlyStop | None = key(
        None, "End before that if the loss of the evaluations every evaluate_every steps falls no more."
    )
    keep_best: bool = key(
        False, "Keep the checkpoint with the lowest evaluation loss under the tag best, which keep_last never deletes."
    )
    output: str = key("runs/train", "Folder for everything that the run writes.")
    evaluate_every: CountInt = key(100, "Steps between validations. 0: only at the end.")
    evaluate_batches: PositiveInt = key(20, "Micro-batches per rank in a validation.")
    save_every: CountInt = key(0, "Steps between checkpoints. 0: only at the end.")
    copy_every: PositiveInt = key(1, "Steps between copies of the state in memory, with checkpoint.peer_copies.")
    resume: bool | Literal["auto"] = key(
        False, "Continue from the last checkpoint in output. auto: if there is one, for launchers that restart ranks."
    )
    ranks: PositiveInt = key(1, "Number of ranks to start. Ignored under a launcher.")
    threads: PositiveInt | None = key(None, "Threads per rank. Null: the cores divided by the ranks.")
    check_every: CountInt = key(
        0, "Steps between checks of all ranks' processors, memory and links. 0: only at a signal (SIGUSR2)."
    )
    log_every: PositiveInt = key(10, "Steps between two lines in the log.")
    sample: SampleSettings = key(SampleSettings(), "Texts to generate at the end of the run.")

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            both = f"steps = {self.steps} and epochs = {self.epochs} both give its length; leave out one of them"
            raise ValueError("needs steps or epochs" if self.steps is None else f"{both}, or set it to null")
        return self

    @property
    def watches_loss(self) -> bool:
        """True if evaluations decide about the end of the run or the best checkpoint."""
        return self.keep_best or self.early_stop is not None


KEYS_BY_USE: dict[str, list[str]] = json.loads(Path(__file__).with_name("keys_by_use.json").read_text(encoding="utf-8"))
"""Keys and sections on which an ``evaluation`` of a run and the memory of its weights depend; those that may change at
a ``resume``, as its result does not depend on them, or as spikes may be its reason; and those that the ``trials`` of a
comparison set themselves, or that change nothing of an update."""

WITH_TOTAL = ("warmupdecaylr", "warmupcosinelr", "wsd")  # schedules with the number of all steps as a parameter
# Schedules with rates of their own, which are the same for all groups of parameters.
ONE_RATE = ("warmuplr", "warmupdecaylr", "onecycle", "lrrangetest")


class TrainSettings(Settings):
    """Settings of a run: the engine's, and sections that the engine does not know."""

    model: ModelShape | None = key(None, "The language model of zeromesh train.")
    huggingface: HuggingFace | None = key(None, "A model of transformers, for zeromesh train.")
    lora: Lora | None = key(None, "Adapters of PEFT that zeromesh train adds to a model of transformers.")
    dpo: Preference | None = key(None, "Preferences instead of text as what zeromesh train learns from: DPO.")
    data: TextData | None = key(None, "The training data of zeromesh train.")
    run: RunSettings | None = key(None, "Steps, ranks and output of zeromesh train.")

    @classmethod
    def refusals(cls) -> Sequence[Refusal[Self]]:
        """Return the combinations that the engine refuses, and those of these sections."""
        return [*super().refusals(), *TRAIN_REFUSALS]

    def resolve(
        self, data_size: int, sizes: Mapping[str, int] | None = None, elastic: bool = False
    ) -> ResolvedTrainSettings:
        """Return the settings with the batch sizes worked out, as ``Settings.resolve`` does."""
        return ResolvedTrainSettings.model_validate(self._resolved_values(data_size, sizes, elastic))

    @property
    def times_whole_run(self) -> bool:
        """True for a run of ``zeromesh train``, whose report has the times of all updates."""
        return self.run is not None

    @property
    def rows_per_sample(self) -> int:
        """Two for DPO, one for each answer."""
        return 1 if self.dpo is None else 2


class ResolvedTrainSettings(Resolved, TrainSettings):
    """The same in which nothing depends on the number of ranks any more."""


TRAIN_REFUSALS: list[Refusal[TrainSettings]] = [
    (
        lambda s: s.dpo and s.mesh.context > 1,
        "dpo compares whole answers, which mesh.context = {s.mesh.context} divides; set it to 1, and use mesh.tensor, "
        "mesh.pipeline or zero_optimization.stage 3 for long answers",
    ),
    (
        lambda s: s.dpo and s.data and s.data.format not in (None, "preference"),
        "dpo learns from records of prompt, chosen and rejected, and data.format = {s.data.format}; leave one out",
    ),
    (
        lambda s: s.run and s.run.watches_loss and s.run.evaluate_every == 0,
        "run.early_stop and run.keep_best compare evaluations between steps, and run.evaluate_every = 0 makes none; "
        "set it to a number of steps",
    ),
    (
        lambda s: (
            s.run and s.run.watches_loss and s.data and s.data.validation is None and not s.data.validation_fraction
        ),
        "run.early_stop and run.keep_best need held-out text, and data.validation_fraction = 0.0 leaves none; set it "
        "to 0.02, or name text in data.validation",
    ),
    (
        lambda s: s.model is not None and s.huggingface is not None,
        "model and huggingface both describe the model to train; keep one of them",
    ),
    (
        lambda s: s.lora is not None and s.huggingface is None,
        "lora needs a model of transformers; name its folder with huggingface.path",
    ),
    (
        lambda s: s.huggingface and s.huggingface.quantization and s.lora is None,
        "huggingface.quantization freezes the weights, and without lora nothing would be trained; add a section "
        "lora, or leave quantization out to train all weights",
    ),
    (
        lambda s: s.huggingface and s.huggingface.quantization and s.mesh.tensor > 1,
        "huggingface.quantization: blocks of quantized weights cannot be split along mesh.tensor = "
        "{s.mesh.tensor}; set it to 1, and zero_optimization.stage to 3, which shards them",
    ),
    (
        lambda s: (
            s.lora and s.lora.plus_ratio and not (s.optimizer and isinstance(s.optimizer.params.get("lr"), int | float))
        ),
        "lora.plus_ratio multiplies optimizer.params.lr, which is not set; set it to a number",
    ),
    (
        lambda s: s.lora and s.lora.plus_ratio and s.scheduler and s.scheduler.type.lower() in ONE_RATE,
        "scheduler.type = {s.scheduler.type} gives all parameters one learning rate, against "
        "lora.plus_ratio; use WarmupCosineLR or WSD, which multiply each group's own",
    ),
]
