"""``zeromesh verify``: whether a layout trains a model as one plain process does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from zeromesh.apps.plan.choose.plan_picture import PAGE_ENDS
from zeromesh.apps.train.model import Transformer
from zeromesh.apps.train.planned import planned
from zeromesh.apps.train.screen import is_first, make_console, write
from zeromesh.apps.train.train_settings import ModelShape, TrainSettings
from zeromesh.apps.verify.shrink import HEAD, LENGTH, VOCABULARY, fewest_blocks, subject_of
from zeromesh.apps.verify.small_layout import small_layout
from zeromesh.apps.verify.verification_report import Verdict
from zeromesh.apps.verify.verify_run import TIMEOUT, verify
from zeromesh.base.drawing import require_picture


def run(
    config: Path,
    model: str | None = None,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
    steps: int = 3,
    whole: bool = False,
    timeout: float = TIMEOUT,
    as_json: bool = False,
    picture: Path | None = None,
) -> Verdict:
    """Compare, print the report, and write the picture; without ``model``, that of the configuration is compared."""
    if picture is not None and picture.suffix.lower() not in PAGE_ENDS:
        require_picture(picture)  # before the work, which takes a minute
    settings = planned(config, overrides, TrainSettings.load(config, overrides))
    subject: Any = model
    batch: Any = None
    changes: list[str] = []
    if subject is None:
        subject, batch, changes = configured(settings, ranks, whole)
    progress = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not is_first())
    report = verify(
        subject, settings, batch, steps=steps, ranks=ranks, whole=whole, timeout=timeout, tell=progress.print
    )
    report.changes[:0] = changes
    if is_first():
        if as_json:
            write(json.dumps(report.as_dict(), indent=1) + "\n")
        else:
            report.show(make_console())
        if picture is not None and report.verdict is not Verdict.UNVERIFIED:
            report.draw(picture)
    return report.verdict


def configured(settings: TrainSettings, ranks: int | None, full_size: bool) -> tuple[nn.Module, Any, list[str]]:
    """Return the model that a configuration describes for ``zeromesh train``, made smaller, a batch, and the changes.

    Raises:
        ValueError: it describes none.
    """
    torch.manual_seed(settings.seed)
    sizes = small_layout(settings, ranks).sizes
    if settings.model is not None:
        from zeromesh.apps.train.architectures.decoder import Decoder

        shape, changes = _smaller(settings.model, sizes, fewest_blocks(settings, sizes), full_size)
        ids = torch.randint(shape.vocab_size or VOCABULARY, (2, min(shape.sequence_length, LENGTH)))
        return Decoder(shape), {"tokens": ids, "labels": ids.roll(-1, 1)}, changes
    if settings.huggingface is not None:
        described = Transformer(settings.huggingface, settings.lora)
        blocks = fewest_blocks(settings, sizes)
        subject = subject_of(str(described.folder), None, sizes, blocks, full_size)
        model = _filled(described.adapted(subject.model))
        return model, subject.batch, subject.changes
    raise ValueError(
        "the configuration describes no model: it has neither a section 'model' nor 'huggingface'; name the model "
        "after it: a folder with a config.json of transformers, or package.module:function"
    )


def _smaller(shape: ModelShape, sizes: Any, blocks: int, full_size: bool) -> tuple[ModelShape, list[str]]:
    entries = shape.vocab_size or VOCABULARY
    if full_size:
        return shape.model_copy(update={"vocab_size": entries}), []
    unit = max(2, sizes["tensor"] * sizes["context"])
    keys = shape.kv_heads or shape.heads
    group = min(2, shape.heads // keys)
    fewer = unit if keys % unit == 0 and keys > unit else keys
    heads = fewer * group
    update: dict[str, Any] = {"layers": min(shape.layers, max(2, blocks)), "dropout": 0.0}
    update["vocab_size"] = min(entries, VOCABULARY + entries % sizes["tensor"])
    if heads * HEAD < shape.hidden_size:
        update |= {"heads": heads, "hidden_size": heads * HEAD}
        update["kv_heads"] = None if shape.kv_heads is None else fewer
        update["mlp_size"] = None if shape.mlp_size is None else 2 * heads * HEAD
    changed = [f"{key} {getattr(shape, key)} -> {new}" for key, new in update.items() if getattr(shape, key) != new]
    return shape.model_copy(update=update), changed


def _filled(model: nn.Module) -> nn.Module:
    """Give adapters values, which are made when training begins."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                value = 0.02 * torch.randn(parameter.shape)
                module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))
    return model
