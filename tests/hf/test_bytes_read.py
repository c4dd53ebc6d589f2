"""Ranks read the files of a pretrained model once between them, whichever library asks transformers for it.

``tests/checkpoint/test_pretrained.py`` counts the reads of ``zeromesh.from_pretrained``.
"""

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import safetensors

from harness import run_ranks
from hf_training import arguments, fresh_libraries, model, stage

pytest.importorskip("accelerate")
pytestmark = pytest.mark.full

OPEN = safetensors.safe_open


class Slice:
    """A tensor of a file that is read in parts."""

    def __init__(self, inner: Any, count: Any) -> None:
        self.inner, self.count = inner, count

    def __getitem__(self, part: Any) -> Any:
        found = self.inner[part]
        self.count(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Counted:
    """A file of safetensors that counts the bytes of the tensors which are read."""

    read: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.inner = OPEN(*args, **kwargs)

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, name: str) -> Any:
        return lambda tensor: self.read.update({name: tensor.nbytes})

    def get_tensor(self, name: str) -> Any:
        found = self.inner.get_tensor(name)
        self.note(name)(found)
        return found

    def get_slice(self, name: str) -> Slice:
        return Slice(self.inner.get_slice(name), self.note(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def by_transformers(folder: Path) -> Any:
    """Trainer under the alias: its arguments come before the model."""
    import transformers

    args = transformers.TrainingArguments(str(folder / "out"), **arguments(stage(3)))
    return args, transformers.AutoModelForCausalLM.from_pretrained(folder / "model")


def by_accelerate(folder: Path) -> Any:
    import accelerate
    import transformers

    import zeromesh.hf

    config = stage(3, train_micro_batch_size_per_gpu=2)
    accelerator = accelerate.Accelerator(deepspeed_plugin=zeromesh.hf.plugin(config))
    return accelerator, transformers.AutoModelForCausalLM.from_pretrained(folder / "model")


def by_lightning(folder: Path) -> Any:
    """Return the hook in which Lightning's modules make their layers, with the context of our strategy around it."""
    pytest.importorskip("lightning")
    import torch.distributed as dist
    import transformers

    from zeromesh.hf.lightning import Strategy

    strategy = Strategy(stage(3))
    assert dist.is_initialized()
    with strategy.model_sharded_context():
        return strategy, transformers.AutoModelForCausalLM.from_pretrained(folder / "model")


WAYS = {"transformers": by_transformers, "accelerate": by_accelerate, "lightning": by_lightning}


def bytes_read(way: str, folder: Path) -> dict[str, int]:
    from zeromesh.hf.late import activate

    Counted.read = Counter()
    with fresh_libraries():
        activate()
        import transformers.modeling_utils  # noqa: F401  patched below

        with patch("safetensors.safe_open", Counted), patch("transformers.modeling_utils.safe_open", Counted):
            kept = WAYS[way](folder)
    del kept
    return dict(Counted.read)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_read_each_weight_once_between_them(way: str, tmp_path: Path) -> None:
    whole = model()
    whole.save_pretrained(tmp_path / "model")
    ranks = run_ranks(bytes_read, 2, way, tmp_path, timeout=200)
    total = sum(map(Counter, ranks), Counter())
    for name, parameter in whole.named_parameters():
        assert total[name] == parameter.nbytes, (name, ranks)
