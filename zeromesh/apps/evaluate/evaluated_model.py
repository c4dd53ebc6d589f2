"""The model to evaluate: a run of ``zeromesh train`` or a folder of transformers, as an engine on any ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

import zeromesh
from zeromesh import Engine, init_distributed
from zeromesh.apps.train.data.tokenizer import TextTokenizer, load_tokenizer
from zeromesh.apps.train.model import BuiltIn, Transformer, language_model, quiet
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.train_settings import KEYS_BY_USE, TrainSettings
from zeromesh.base.files import read_text
from zeromesh.base.lengths import positions
from zeromesh.base.requirements import imported
from zeromesh.checkpoint.checkpoint_folder import is_readable, locate
from zeromesh.checkpoint.weights.export import ADAPTERS
from zeromesh.checkpoint.weights.pretrained import configuration, is_model_id, model_folder
from zeromesh.comm.agreement import agree_run, world_group
from zeromesh.comm.environment import device_of_group
from zeromesh.config.errors import ConfigError

LAYOUT = ("mesh", "tensor_parallel", "sequence_parallel_size", "pipeline")
LONGEST = 4096  # tokens of a window of text, unless it is set: the logits of the longest that a model takes may not fit


def adapted_model(folder: Path, dtype: torch.dtype | str) -> nn.Module:
    """Return the model that adapters of PEFT name, with them; raise ValueError if the library is not installed."""
    peft = imported("peft", f"the adapters in {str(folder)!r} need PEFT")
    model: nn.Module = peft.AutoPeftModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    return model


@dataclass(frozen=True)
class EvaluatedModel:
    """A run or a model. Each rank makes the engine by itself."""

    path: Path
    tag: str | None = None  # checkpoint of a run
    dtype: str | None = None  # name of the dtype to compute in; None is the run's, or that of a folder's weights

    @cached_property
    def run(self) -> RunFolder | None:
        """Folder of the run; None for a model of transformers. Raises ValueError if it is neither."""
        if is_model_id(self.path) and not self.path.exists():
            return None
        if not self.path.is_dir():
            raise ValueError(
                f"{str(self.path)!r} is no folder; name the output folder of a run (run.output), or a folder with the "
                "config.json of a model of transformers"
            )
        folder = RunFolder(self.path)
        if not folder.config.is_file():
            if (self.path / ADAPTERS[0]).is_file():
                return None
            raise ValueError(
                f"{str(self.path)!r} holds neither a run nor a model; name the folder that run.output named in "
                "training, with --tag for one of its checkpoints, or a folder with the config.json of a model of "
                "transformers"
            )
        try:
            is_run = "run" in json.loads(read_text(folder.config))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{str(folder.config)!r} is not readable: {error}") from None
        if is_run and self.dtype is not None:
            raise ValueError(f"--dtype: the run in {str(self.path)!r} is evaluated in its own dtype; leave it out")
        if not is_run and self.tag is not None:
            raise ValueError(f"--tag: {str(self.path)!r} is a model, which has no checkpoints; leave it out")
        return folder if is_run else None

    @cached_property
    def checkpoint(self) -> str | None:
        """Tag of the checkpoint of a run; None for a model."""
        if self.run is None:
            return None
        tag = self.tag or self.run.last_checkpoint
        if tag is None:
            remedy = "continue it with zeromesh train CONFIG --resume"
            if self.run.has_finished and self._settings.huggingface is not None:
                remedy = f"evaluate its weights instead: {self.run.model}"
            raise ValueError(f"the run in {str(self.path)!r} holds no checkpoint; {remedy}")
        if not is_readable(locate(self.run.checkpoints, tag)):
            tags = sorted(path.name for path in self.run.checkpoints.iterdir() if is_readable(path))
            raise ValueError(
                f"--tag: {str(self.run.checkpoints)!r} has no checkpoint {tag!r}; it has {', '.join(tags) or 'none'}"
            )
        self.run.require_base()
        return tag

    @cached_property
    def _settings(self) -> TrainSettings:
        if self.run is not None:
            values = json.loads(self.run.settings().to_json())
            values = {key: value for key, value in values.items() if key in KEYS_BY_USE["evaluation"]}
            values["zero_optimization"] |= {"offload_optimizer": None}
            return TrainSettings.load(values, tells=False)
        return TrainSettings.load(
            {"huggingface": {"path": str(self._base), "sequence_length": 1}, "zero_optimization": {"stage": 3}},
            tells=False,
        )

    @cached_property
    def _base(self) -> str | Path:
        """Folder, or name on the Hub, with the configuration of a model of transformers."""
        adapters = self.path / ADAPTERS[0]
        if not adapters.is_file():
            return self.path
        base = json.loads(read_text(adapters)).get("base_model_name_or_path")
        if not base or not (Path(base).is_dir() or is_model_id(base)):
            raise ValueError(
                f"{str(adapters)!r} names {base!r} as the model that it adapts, which is not there; put it back, or "
                "export the run with --merge"
            )
        return str(base)

    @cached_property
    def language(self) -> BuiltIn | Transformer:
        """Description of the model."""
        return language_model(self._settings)

    @cached_property
    def longest(self) -> int | None:
        """Tokens of the longest text that the model takes; None without a limit."""
        if isinstance(self.language, BuiltIn):
            return self.language.sequence_length
        return positions(configuration(self.language.folder)[0].get_text_config())

    @property
    def window(self) -> int:
        """Tokens of a window of text, by default."""
        if self.run is not None:
            return self.language.sequence_length
        return min(self.longest or LONGEST, LONGEST)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of the run or the model; raise ValueError if it has none."""
        if self.run is not None:
            if not self.run.tokenizer.is_dir():
                raise ValueError(
                    f"the run in {str(self.path)!r} has no tokenizer, since it was trained on tokens; only its own "
                    "held-out data can be evaluated: leave --data, --choices and --tasks out"
                )
            return load_tokenizer(self.run.tokenizer)
        folder = model_folder(str(self.path))
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        return load_tokenizer(folder if any((folder / name).is_file() for name in names) else Path(self._base))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the forward."""
        if self.run is not None:
            precision = self._settings.precision
            return precision.compute or precision.autocast or torch.float32
        if self.dtype is not None:
            dtype: torch.dtype = getattr(torch, self.dtype)
            return dtype
        assert isinstance(self.language, Transformer)
        saved = configuration(self.language.folder)[0].get_text_config().dtype
        return saved if isinstance(saved, torch.dtype) else torch.float32

    @property
    def ranks(self) -> int:
        """Ranks to start, by default: those of the run, or one."""
        return 1 if self._settings.run is None else self._settings.run.ranks

    def engine(self) -> Engine:
        """Return the engine, with the weights of the checkpoint or the folder. Collective."""
        world = world_group(device_of_group(init_distributed()))
        model = agree_run(world, "build the model", self._build)
        settings = self._settings
        try:
            settings.resolve_mesh(world.size)
        except ConfigError:  # the layout of a run on other ranks
            values = settings.model_dump(mode="json", exclude_unset=True, exclude=set(LAYOUT))
            values["zero_optimization"] = {**values.get("zero_optimization", {}), "stage": 3}
            settings = TrainSettings.load(values, tells=False)
        settings = settings.model_copy(update={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
        engine, *_ = zeromesh.initialize(model, config=settings)
        if self.run is not None:
            engine.load_checkpoint(self.run.checkpoints, self.checkpoint, load_module_only=True)
        return engine

    def _build(self) -> nn.Module:
        if self.run is not None:
            return self.language.build()
        quiet()
        if (self.path / ADAPTERS[0]).is_file():
            return adapted_model(self.path, self.compute_dtype)
        model: nn.Module = zeromesh.from_pretrained(model_folder(str(self.path)), dtype=self.compute_dtype)
        return model
