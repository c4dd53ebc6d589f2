"""``deepspeed.utils.zero_to_fp32``: whole weights from a checkpoint that engines of ZeroMesh wrote, by one process."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.base.files import write_text
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.checkpoint_folder import latest, locate
from zeromesh.checkpoint.contents import FROZEN_LEFT_OUT
from zeromesh.checkpoint.weights.weight_files import ExportFiles

SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SCRIPT = "zero_to_fp32.py"
"""Name of the program that ``save_checkpoint`` of the drop-in leaves in the folder of checkpoints."""

NAMES = {False: "pytorch_model.bin", True: "model.safetensors"}
"""Name of the weights' file, by whether it is of safetensors."""


def _tensors(folder: str | Path, tag: str | None, exclude_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and buffers of a checkpoint by name; parameters as their masters, in fp32."""
    chosen = tag or latest(Path(folder))
    if chosen is None:
        raise ValueError(f"{str(folder)!r} holds no checkpoint; give the folder that engine.save_checkpoint was given")
    reader = Reader(locate(Path(folder), chosen))
    reader.verify(names={name for name in reader.names if name.startswith(("parameter/", "buffer/"))})
    if "parameters" not in reader.manifest:
        raise ValueError(f"{reader.folder} does not name its parameters; load it, and save it with this version")
    parameters: dict[str, Any] = reader.manifest["parameters"]
    for name, row in parameters.items():
        left_out = exclude_frozen or reader.manifest.get(FROZEN_LEFT_OUT, False)
        if left_out and not row["trainable"]:
            continue
        # Tensors without elements are not in the files.
        value = reader.tensor(f"parameter/{name}") if f"parameter/{name}" in reader.names else torch.empty(0)
        value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        yield name, value
        yield from ((other, value) for other, source in reader.manifest.get("tied", {}).items() if source == name)
    for name in sorted(name for name in reader.names if name.startswith("buffer/")):
        yield name.removeprefix("buffer/"), reader.tensor(name)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the whole state dict of a checkpoint, on the host.

    Args:
        checkpoint_dir: the folder of checkpoints.
        tag: which one; None is the latest.
        exclude_frozen_parameters: leave out parameters that are not trained.
        lazy_mode: no effect: tensors are read at once; ``contiguous()`` returns them, as in DeepSpeed's mode.

    Raises:
        FileNotFoundError, ValueError: there is no such checkpoint, or it is damaged.
    """
    return dict(_tensors(checkpoint_dir, tag, exclude_frozen_parameters))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights into a model on the CPU, and return it.

    A model that an engine shards has to be gathered around the call, with ``modifier_rank`` if it is to change.
    """
    model = model.cpu()
    state, now = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), model.state_dict()
    # An equal value is not written: GatheredParameters without a modifier_rank refuses changes.
    changed = {n: value for n, value in state.items() if n in now and not torch.equal(now[n], value.to(now[n].dtype))}
    model.load_state_dict(changed, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's weights as files that ``from_pretrained`` of transformers opens.

    Args:
        checkpoint_dir: the folder of checkpoints.
        output_dir: folder of the files.
        max_shard_size: bytes of tensors in one file, also as text such as ``5GB``; None: all in one.
        safe_serialization: write safetensors in place of torch's pickles.
        tag: which checkpoint; None is the latest.
        exclude_frozen_parameters: leave out parameters that are not trained.

    Raises:
        FileNotFoundError, ValueError: there is no such checkpoint, it is damaged, or the size is none.
        OSError: the files cannot be written.
    """
    seen: set[int] = set()
    with ExportFiles(Path(output_dir), NAMES[safe_serialization], _bytes(max_shard_size)) as files:
        for name, value in _tensors(checkpoint_dir, tag, exclude_frozen_parameters):
            # Safetensors refuses one tensor under two names; readers tie them again.
            if not (safe_serialization and value.numel() and value.data_ptr() in seen):
                files.add({name: value})
            seen = {value.data_ptr()}


def _bytes(size: str | int | None) -> int:
    if size is None or isinstance(size, int):
        return size or 2**63
    match = re.fullmatch(r"([\d.]+)\s*([KMG]i?B)", size, re.IGNORECASE)
    if match is None:
        raise ValueError(f"max_shard_size is {size!r}; give a number of bytes, or text such as '5GB' or '500MB'")
    return int(float(match[1]) * SIZES[match[2].upper()])


def leave_script(folder: Path) -> None:
    """Write the program ``zero_to_fp32.py``, which does what ``main`` does, into a folder of checkpoints."""
    text = f"from {__name__} import main\n\nif __name__ == '__main__':\n    main()\n"
    write_text(folder / SCRIPT, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert a checkpoint as the command line says, whose options are those of DeepSpeed's ``zero_to_fp32.py``."""
    parser = ArgumentParser(description="Write the weights of a checkpoint in fp32, as from_pretrained reads them.")
    parser.add_argument("checkpoint_dir", help="the folder of checkpoints")
    parser.add_argument("output_dir", help="folder of the files of weights")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of tensors in one file, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint; by default the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what is not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    options = vars(parser.parse_args(arguments))
    options.pop("debug")
    convert_zero_checkpoint_to_fp32_state_dict(**options)
