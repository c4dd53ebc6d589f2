"""``zeromesh export``: a checkpoint of a run to a folder for ``from_pretrained``, tensor by tensor, and to the Hub."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zeromesh import __version__
from zeromesh.apps.train.architectures.decoder import Sizes
from zeromesh.apps.train.data.tokenizer import load_tokenizer
from zeromesh.apps.train.export_gguf import FILE as GGUF
from zeromesh.apps.train.export_gguf import require_gguf, write_gguf
from zeromesh.apps.train.model import BuiltIn, Transformer, language_model
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.screen import make_console
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.files import read_text, write_text
from zeromesh.base.quantized_layers import is_quantized, layers, plain_parameter
from zeromesh.base.requirements import imported
from zeromesh.base.words import scaled_text
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.checkpoint_folder import locate
from zeromesh.checkpoint.weights.export import (
    State,
    adapter_names,
    base_of,
    dense_copy,
    is_adapted,
    plain_state,
    write_model,
    written_names,
)
from zeromesh.checkpoint.weights.pretrained import first_names, require_transformers
from zeromesh.checkpoint.weights.quantize_weights import values

FILE = "model.safetensors"
WEIGHTS = "weights"  # what a GGUF file is made of, until it is whole
DRAFT = ".zeromesh-export"
CARD = "README.md"


def export(
    run: Path,
    output: Path,
    tag: str | None,
    merge: bool,
    gguf: bool = False,
    hub: str | None = None,
    public: bool = False,
) -> None:
    """Write the model of a run with its tokenizer, in the dtype of its computations, and print where it is.

    ``gguf`` writes one file for llama.cpp; ``hub`` names a repository to which the folder is uploaded.
    """
    if public and hub is None:
        raise ValueError("--public is for --hub NAME; leave it out")
    if gguf:
        require_gguf()
    api = None if hub is None else require_hub(hub)
    console = make_console()
    checkpoint = export_files(run, output, tag, merge, gguf)
    console.print(f"{checkpoint} is written to {output / GGUF if gguf else output}", soft_wrap=True)
    if hub is not None:
        write_card(RunFolder(run), output, hub)
        console.print(f"{output} is uploaded to {push(api, output, hub, public)}", soft_wrap=True)


def export_files(run: Path, output: Path, tag: str | None, merge: bool, gguf: bool = False) -> Path:
    """Write the model of a run with its tokenizer to a new folder, and return the folder of the checkpoint."""
    folder = RunFolder(run)
    reader = _reader(folder, tag)
    settings = folder.settings()
    language = language_model(settings)
    dtype = settings.precision.compute or torch.float32
    with _draft(output) as folder_draft:
        draft = folder_draft / WEIGHTS if gguf else folder_draft
        draft.mkdir(exist_ok=True)
        if isinstance(language, BuiltIn):
            if merge:
                raise ValueError(f"--merge: the run in {str(run)!r} has no adapters; leave it out")
            _export_built_in(language, reader, folder, draft, dtype)
        else:
            assert isinstance(language, Transformer)
            folder.require_base()
            # A file of llama.cpp holds no adapters.
            merge = merge or (gguf and language.lora is not None)
            _export_transformer(language, reader, draft, dtype, merge)
        folder.copy_tokenizer(draft)
        if gguf:
            write_gguf(draft, folder_draft / GGUF)
            shutil.rmtree(draft)
    return reader.folder


@contextmanager
def _draft(output: Path) -> Iterator[Path]:
    """Return a folder inside the output whose files move to the output at the end; after an error, nothing is left."""
    draft, is_new = output / DRAFT, not output.exists()
    names = (
        [] if is_new else [path.name for path in output.iterdir() if path != draft] if output.is_dir() else ["a file"]
    )
    if names:  # never overwritten, since it may be another export that someone uses
        some = ", ".join(sorted(names)[:3])
        beside = f", beside {DRAFT} of an export that was interrupted" if draft.exists() else ""
        raise ValueError(
            f"{str(output)!r} is there already, and is not overwritten; it holds {some}{beside}: choose another folder"
        )
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        yield draft
        # Without the configuration nothing opens the folder, so it comes last.
        for path in sorted(draft.iterdir(), key=lambda path: path.name.endswith("config.json")):
            path.rename(output / path.name)
        draft.rmdir()
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(draft, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                output.rmdir()
        raise


def _reader(folder: RunFolder, tag: str | None) -> Reader:
    chosen = tag or folder.last_checkpoint
    if chosen is None:
        raise ValueError(f"{str(folder.path)!r} holds no checkpoint; name the folder that run.output named in training")
    # Only what is written is checked: an optimizer state may be many times as large.
    reader = Reader(locate(folder.checkpoints, chosen))
    reader.verify(names={name for name in reader.names if name.startswith(("parameter/", "buffer/"))})
    return reader


def _export_built_in(language: BuiltIn, reader: Reader, folder: RunFolder, output: Path, dtype: torch.dtype) -> None:
    transformers = require_transformers()
    end = load_tokenizer(folder.tokenizer).end if folder.tokenizer.is_dir() else 0
    name, arguments = published_configuration(language.shape, end)
    make = getattr(transformers, name)
    # Without memory: only its configuration and the names of its tensors are needed.
    with torch.device("meta"):
        model = make(make.config_class(**arguments)).to(dtype)

    def read(parameter: str) -> torch.Tensor:
        return reader.tensor(f"parameter/{parameter}").to(dtype)

    states = ({tensor.name: tensor.make(read)} for tensor in published_tensors(language.shape))
    write_model(model, states, output, FILE)


def _export_transformer(language: Transformer, reader: Reader, output: Path, dtype: torch.dtype, merge: bool) -> None:
    if merge and language.quantized:
        # A checkpoint has no scales of quantized weights: they are made of the base's files once more.
        model: Any = language.build()
    else:
        with torch.device("meta"):
            model = language.unfilled(dtype)
    if merge and not is_adapted(model):
        raise ValueError("--merge: the run has no adapters; leave it out")
    if is_adapted(model) and not merge:
        first = first_names(model)
        state = {name: reader.tensor(f"parameter/{first.get(name, name)}") for name in adapter_names(model)}
        model.save_pretrained(str(output), state_dict=state)
    else:
        write_model(model, _states(model, reader), output, FILE)


def _states(model: nn.Module, reader: Reader) -> Iterator[State]:
    """Yield the state of the model without adapters, block by block."""
    # In memory one block at a time; transformers fuses and splits tensors, as of experts, within blocks only.
    written, first = written_names(model), first_names(model)

    def real(path: str) -> nn.Module:
        """Return a copy of an adapted layer, with its values."""
        # The model is on the meta device, and merging adapters needs values: of one layer at a time.
        adapted = model.get_submodule(path)
        base = base_of(adapted)
        if coded := [inner for _, inner in layers(base)]:
            with ExitStack() as stack:
                for inner in coded:
                    stack.enter_context(values(inner))
                layer = dense_copy(adapted)
            dense_names = [plain_parameter(base, name) for name, p in base.named_parameters() if is_quantized(p)]
            dense_ids = {id(base_of(layer).get_parameter(name)) for name in dense_names}
        else:
            layer, dense_ids = copy.deepcopy(adapted).to_empty(device="cpu"), set()
        names = {name: f"{path}.{name}" for name, p in layer.named_parameters() if id(p) not in dense_ids}
        state = {
            name: reader.tensor(f"parameter/{first.get(full_name, full_name)}") for name, full_name in names.items()
        }
        layer.load_state_dict(state, strict=False, assign=True)
        result: nn.Module = layer
        return result

    for _, members in groupby(model.named_parameters(), lambda named: _block(named[0])):
        state: State = {}
        for name, like in members:
            value = like if is_quantized(like) else reader.tensor(f"parameter/{name}").to(like.dtype)
            state |= dict.fromkeys(written[name], value)
        yield plain_state(model, state, real)
    for name in reader.names:
        kind, _, buffer = name.partition("/")
        if kind == "buffer":
            yield plain_state(model, {buffer: reader.tensor(name)}, real)


def _block(name: str) -> str:
    # The path ends at the first number, as in model.layers.3.
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


# The Hugging Face Hub.


def require_hub(name: str) -> Any:
    """Return the API of the Hub; raise ValueError if its package, a valid name or a token is missing."""
    purpose = "--hub needs the package huggingface_hub"
    huggingface_hub, utilities = (imported(module, purpose) for module in ("huggingface_hub", "huggingface_hub.utils"))
    try:
        utilities.validate_repo_id(name)
    except utilities.HFValidationError as error:
        raise ValueError(f"--hub = {name!r} is no name of a repository, such as org/model: {error}") from None
    api = huggingface_hub.HfApi()
    if (api.token or huggingface_hub.get_token()) is None:
        raise ValueError("--hub: no token of the Hugging Face Hub is stored; hf auth login, or set HF_TOKEN")
    return api


def push(api: Any, folder: Path, name: str, public: bool) -> str:
    """Upload a folder, and return the address of the repository; raise ValueError if the Hub refuses it."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        address = str(api.create_repo(name, private=not public, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Upload a run of ZeroMesh")
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise ValueError(
            f"--hub: {name} could not be written ({error}); the export is whole in {str(folder)!r}: "
            f"hf upload {name} {folder} tries again"
        ) from None
    return address


def write_card(run: RunFolder, folder: Path, name: str) -> None:
    """Write the card of the model: where it comes from, and what the run's report measured."""
    settings, report = run.settings(), {}
    if run.report.is_file():
        report = json.loads(read_text(run.report))
    language = language_model(settings)
    head = ["library_name: peft" if settings.lora else "library_name: transformers", "pipeline_tag: text-generation"]
    if isinstance(language, Transformer):
        head.append(f"base_model: {settings.huggingface.path if settings.huggingface else ''}")
    rows = [("steps", report.get("steps")), ("tokens", report.get("tokens")), ("parameters", report.get("parameters"))]
    lines = [f"| {what} | {scaled_text(value)} |" for what, value in rows if value is not None]
    for what, key in (
        ("training loss, nats per token", "training_loss"),
        ("held-out loss, nats per token", "validation_loss"),
        ("held-out bits per byte", "bits_per_byte"),
    ):
        if report.get(key) is not None:
            lines.append(f"| {what} | {report[key]:.4f} |")
    table = ["| figure | value |", "|---|---|", *lines] if lines else ["The run has not ended, and has no figures yet."]
    text = ["---", *head, "---", "", f"# {name}", "", f"Trained with ZeroMesh {__version__} (`zeromesh train`).", ""]
    write_text(folder / CARD, "\n".join([*text, *table]) + "\n")


# Names in transformers.


class Published(NamedTuple):
    """A tensor of a model of transformers."""

    name: str
    sources: tuple[str, ...]  # names in the Decoder; their tensors are concatenated along the last dim
    transposed: bool = False  # the sources, before that

    def make(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the tensor; ``read`` returns a parameter of the ``Decoder``."""
        parts = [read(source) for source in self.sources]
        return torch.cat([part.mT for part in parts] if self.transposed else parts, dim=-1).contiguous()


# By architecture, the layers of a block in transformers, and those of the Decoder. GPT-2 has one matrix for queries,
# keys and values, and its matrices are transposed.
BLOCKS: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("published_names.json").read_text(encoding="utf-8")
)


def published_tensors(shape: ModelShape) -> Iterator[Published]:
    """Yield all tensors of the model of transformers."""
    sizes = Sizes.of(shape)
    gpt = shape.architecture == "gpt"
    kinds = ("weight", "bias") if gpt else ("weight",)
    if gpt:
        yield Published("transformer.wte.weight", ("embedding.weight",))
        yield Published("transformer.wpe.weight", ("positions.weight",))
    else:
        yield Published("model.embed_tokens.weight", ("embedding.weight",))
    for number in range(shape.layers):
        block = f"transformer.h.{number}" if gpt else f"model.layers.{number}"
        for name, sources in BLOCKS[shape.architecture].items():
            for kind in kinds:
                parts = tuple(f"blocks.{number}.{source}.{kind}" for source in sources)
                transposed = gpt and kind == "weight" and not name.startswith("ln_")
                yield Published(f"{block}.{name}.{kind}", parts, transposed)
    norm = "transformer.ln_f" if gpt else "model.norm"
    yield from (Published(f"{norm}.{kind}", (f"norm.{kind}",)) for kind in kinds)
    if not sizes.tied:
        yield Published("lm_head.weight", ("head.weight",))


def published_configuration(shape: ModelShape, end: int) -> tuple[str, dict[str, Any]]:
    """Return the name of the class in transformers, and the arguments of its configuration; ``end`` ends a text."""
    sizes = Sizes.of(shape)
    common = {
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": sizes.tied,
        "initializer_range": shape.initializer_range,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    if shape.architecture == "gpt":
        dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop"), shape.dropout)
        return "GPT2LMHeadModel", common | dropped | {
            "n_positions": shape.sequence_length,
            "n_embd": shape.hidden_size,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": sizes.mlp,
            "attn_pdrop": 0.0,
            "layer_norm_epsilon": shape.norm_eps,
            "activation_function": "gelu_new",
        }
    return "LlamaForCausalLM", common | {
        "hidden_size": shape.hidden_size,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "max_position_embeddings": shape.sequence_length,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
