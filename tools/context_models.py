"""Train every causal model and encoder of transformers, tiny, with its sequences spread over two ranks, and compare.

    python tools/context_models.py              # all of them; writes docs/context-models.md
    python tools/context_models.py bert mpt     # prints the rows of these

Models and how they are made small are those of ``causal_models.py``.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import causal_models
import torch
import torch.distributed as dist
from causal_models import IMPOSSIBLE, LARGEST, RANKS, ROOT, TOLERANCES, VOCABULARY, configuration, throughout
from harness import RankFailure, close_pools, run_ranks
from huggingface_models import without_dropout
from torch import Tensor, nn

from zeromesh.comm.mesh import Mesh
from zeromesh.parallel.context.applied import Unsupported
from zeromesh.parallel.context.spread_batch import IGNORE_LABEL
from zeromesh.parallel.context.spread_model import apply

PAGE = ROOT / "docs" / "context-models.md"
LENGTH = 16
LIMIT = 90
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
"""Labels -> table of transformers that names a class of models for each type."""
COLUMNS = (("ring", "whole"), ("auto", "whole"), ("auto", "padded"))
"""Strategy and batch of each column."""


def rows() -> list[tuple[str, str]]:
    """Return (task, type of the model) of all models."""
    from transformers.models.auto import modeling_auto

    return [(task, name) for task, table in TASKS.items() for name in getattr(modeling_auto, table)]


def build(task: str, name: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights; none of them zero or one, where errors would not show."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = getattr(transformers, getattr(modeling_auto, TASKS[task])[name])
    config = configuration(name, kind)
    without_dropout(config)
    for option in ("classifier_dropout", "classifier_dropout_prob"):  # null stands for a tenth
        if task == "token":
            setattr(config, option, 0.0)
    config.router_jitter_noise = 0.0  # which each rank draws for itself
    config._experts_implementation = "eager"  # others take no float64
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters are too many; give the options that are large in SPECIAL")
    torch.manual_seed(0)
    model = kind(config).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype), alpha=0.05)
    return model


def batch(task: str, given: str) -> dict[str, Tensor]:
    """Return whole sequences whose labels count unevenly on the ranks; the same on all of them."""
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids % 2 if task == "token" else ids.clone()
    labels[0, 5:9] = IGNORE_LABEL
    data = {"input_ids": ids, "labels": labels}
    if given == "padded":  # before the tokens
        mask = torch.ones_like(ids)
        mask[0, :3], mask[1, :7] = 0, 0
        labels[mask == 0] = IGNORE_LABEL
        data["attention_mask"] = mask
    return data


def gradients(model: Any, task: str, given: str, applied: Any = None) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients by name."""
    data = batch(task, given)
    output = model(**data)
    loss = getattr(output, "loss", None)
    if loss is None:
        labels = data["labels"] if task != "causal" else nn.functional.pad(data["labels"][:, 1:], (0, 1), value=-100)
        labels = labels if applied is None else applied.part(labels)
        loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        loss = loss if applied is None else applied.mean_loss(loss, labels)
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def on_rank(task: str, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the dtype, and for each column what came out: an error, a reason, or a failure."""
    for dtype in (torch.float64, torch.float32):
        try:
            with throughout(dtype):
                want = {given: gradients(build(task, name, dtype), task, given) for given in ("whole", "padded")}
            break
        except Exception as error:
            last = error
    else:
        return "", (f"not built: {short(last)}",) * len(COLUMNS)
    found = []
    for strategy, given in COLUMNS:
        with throughout(dtype):
            try:
                found.append(f"{_error(task, name, dtype, strategy, given, want[given]):.0e}")
            except (Unsupported, ValueError) as error:
                told = "refused" if isinstance(error, Unsupported) or "context" in str(error) else "failed"
                found.append(f"{told}: {short(error)}")
            except Exception:
                found.append(f"failed: {traceback.format_exc()[-600:]}")
    return str(dtype).removeprefix("torch."), tuple(found)


def _error(task: str, name: str, dtype: torch.dtype, strategy: str, given: str, want: Any) -> float:
    model = build(task, name, dtype)
    group = Mesh({"context": dist.get_world_size()}, torch.device("cpu")).group("context")
    loss, means = gradients(model, task, given, apply(model, strategy, group))
    largest = abs(loss - want[0]) / (1 + abs(want[0]))
    nothing = set(want[1]) ^ set(means)
    if nothing:
        return float("inf")
    if math.isnan(want[0]) and math.isnan(loss):  # a sample all of whose keys are hidden from a token, say
        return 0.0
    for key, one in want[1].items():
        mean = means[key].clone()
        dist.all_reduce(mean)
        gap = float(((mean / dist.get_world_size() - one).abs() / (1 + one.abs())).max()) if one.numel() else 0.0
        largest = gap if not gap <= largest else largest
    return largest


def short(error: Any) -> str:
    """Return the last line of an error, or what fits of it."""
    return " ".join(str(error).strip().splitlines()[-1].split())[:300].replace("|", "/") if str(error).strip() else repr(error)


def row(task: str, name: str, ranks: int = RANKS) -> tuple[str, tuple[str, ...]]:
    if name in IMPOSSIBLE:
        return "", (f"not built: {IMPOSSIBLE[name]}",) * len(COLUMNS)
    try:
        return run_ranks(on_rank, ranks, task, name, timeout=LIMIT)[0]
    except RankFailure as error:
        return "", (f"failed: {str(error)[-600:]}",) * len(COLUMNS)


def main(arguments: list[str]) -> None:
    for task, name in rows():
        if arguments and name not in arguments and f"{task}:{name}" not in arguments and task not in arguments:
            continue
        began = time.monotonic()
        dtype, found = row(task, name)
        print(f"{time.monotonic() - began:.1f} s | {task} | {name} | {dtype} | {' | '.join(found)}", flush=True)
    close_pools()


if __name__ == "__main__":
    import context_models  # the ranks find its functions under this name

    context_models.main(sys.argv[1:])
