"""Messages of ``initialize`` about the log, the batch and the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from zeromesh.comm.environment import Environment

if TYPE_CHECKING:
    from zeromesh.config.settings import Resolved, Settings

_log = logging.getLogger("zeromesh")


def show_log() -> None:
    """Write the log to standard error unless the user has configured it; the first rank writes from INFO on."""
    logger = logging.getLogger("zeromesh")
    if logger.handlers or logging.root.handlers or logger.level != logging.NOTSET:
        return
    first = (dist.get_rank() if dist.is_initialized() else Environment.detect().rank) == 0
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("zeromesh: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if first else logging.WARNING)


def tell_batch(settings: Settings, resolved: Resolved, ranks: int) -> None:
    """Log batch settings that the number of data-parallel ranks has changed."""
    changes = [
        f"{key} is {getattr(resolved, key)} instead of {getattr(settings, key)}"
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        if getattr(settings, key) not in (None, getattr(resolved, key))
    ]
    if changes:
        said, batch = " and ".join(changes), resolved.train_batch_size
        plural = "s" * (ranks > 1)
        _log.info("%s: train_batch_size = %d is kept on %d data-parallel rank%s", said, batch, ranks, plural)


def warn_of_sparse(model: nn.Module) -> None:
    """Warn of embeddings with ``sparse=True``: their gradients are dense here."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    names = [name or "the model" for name, m in model.named_modules() if isinstance(m, tables) and m.sparse]
    if names:
        _log.warning(
            "gradients of %s are dense here, in spite of sparse=True: optimizers with moments or weight decay change "
            "rows that no batch used, which in torch they refuse to do; leave sparse=True out if that is what you want",
            ", ".join(names),
        )


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Silence a logger, and those below it, in this context."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
