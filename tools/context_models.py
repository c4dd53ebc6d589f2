"""Train causal models and encoders of transformers, tiny, with their sequences spread over two ranks, and compare.

    python tools/context_models.py              # all of them; writes docs/context-models.md
    python tools/context_models.py bert mpt     # prints the rows of these

Models, and how they are made small, are those of ``causal_models.py``.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from causal_models import (
    IMPOSSIBLE,
    RANKS,
    ROOT,
    TOLERANCES,
    UNLABELLED,
    VOCABULARY,
    configuration,
    drawn,
    throughout,
)
from harness import RankFailure, close_pools, run_ranks
from huggingface_models import without_dropout
from zeromesh.comm.mesh import Mesh
from zeromesh.parallel.context.spread_batch import IGNORE_LABEL
from zeromesh.parallel.context.spread_model import apply

PAGE = ROOT / "docs" / "context-models.md"
LENGTH = 16
LIMIT = 90
"""Seconds for a model."""
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
"""What labels are -> table of transformers that names a class for each type of models."""
COLUMNS = (("ring", "whole"), ("auto", "whole"), ("auto", "padded"))
"""Strategy and batch of each column."""
WIDER = {"deepseek_v4": 1e-8}
"""Type of the model -> tolerance in float64; this one makes some constants in fp32."""


@dataclass
class Row:
    """What came out for a model.

    Attributes:
        task: one of ``TASKS``.
        name: type of the model.
        dtype: in which it was compared; "": it was not.
        cells: for each column an error, or why there is none.
        way: what each rank computes under the strategy auto.
        kept: bytes that a rank keeps for the backward, over those of one process, where sequences are whole.
    """

    task: str
    name: str
    dtype: str = ""
    cells: tuple[str, ...] = ()
    way: str = ""
    kept: float = math.nan


def models() -> list[tuple[str, str]]:
    """Return (task, type of the model) of all rows."""
    from transformers.models.auto import modeling_auto

    return [(task, name) for task, table in TASKS.items() for name in getattr(modeling_auto, table)]


def build(task: str, name: str, dtype: torch.dtype) -> Any:
    """Return a model with random weights; none of them zero or one, where errors would not show."""
    import transformers
    from transformers.models.auto import modeling_auto

    kind = getattr(transformers, getattr(modeling_auto, TASKS[task])[name])
    config = configuration(name, kind)
    without_dropout(config)
    config._experts_implementation = "eager"  # others take no float64
    config.router_jitter_noise = 0.0  # which each rank draws for itself
    if task == "token":
        config.classifier_dropout = config.classifier_dropout_prob = 0.0  # null stands for a tenth
    if name == "reformer":
        config.axial_pos_shape, config.is_decoder = (4, 4), task == "causal"
    return drawn(kind, config, dtype)


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


def gradients(model: Any, task: str, given: str, applied: Any = None) -> tuple[float, dict[str, Tensor], int]:
    """Return the loss, the gradients by name, and the bytes that were kept for the backward."""
    data, kept = batch(task, given), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    labels = data.pop("labels") if model.config.model_type.startswith(UNLABELLED) else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = model(**data)
    if labels is not None:
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_LABEL)
        labels = labels if applied is None else applied.part(labels)
        output.loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        output.loss = output.loss if applied is None else applied.mean_loss(output.loss, labels)
    output.loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return output.loss.item(), found, sum(kept.values())


def on_rank(task: str, name: str) -> Row:
    """Compare all columns, on each rank."""
    error: Exception
    for dtype in (torch.float64, torch.float32):
        try:
            with throughout(dtype):
                want = {given: gradients(build(task, name, dtype), task, given) for given in ("whole", "padded")}
            break
        except Exception as failure:
            error = failure
    else:
        return Row(task, name, cells=(f"not compared: {short(error)}",) * len(COLUMNS))
    row, cells = Row(task, name, str(dtype).removeprefix("torch.")), []
    for strategy, given in COLUMNS:
        with throughout(dtype):
            cells.append(_cell(row, dtype, strategy, given, want[given]))
    row.cells = tuple(cells)
    return row


def _cell(row: Row, dtype: torch.dtype, strategy: str, given: str, want: Any) -> str:
    model = build(row.task, row.name, dtype)
    group = Mesh({"context": dist.get_world_size()}, torch.device("cpu")).group("context")
    try:
        applied = apply(model, strategy, group)
        loss, found, kept = gradients(model, row.task, given, applied)
    except ValueError as error:
        return f"{'refused' if 'context' in str(error) else 'failed'}: {short(error)}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {short(error)}"
    if strategy == "auto" and given == "whole":
        row.way, row.kept = "its code" if applied.consecutive else "its attention", kept / want[2]
    if math.isnan(want[0]) and math.isnan(loss):  # from a sample of which a token sees nothing
        return "not compared: NaN, also in one process"
    if found.keys() != want[1].keys():
        return "inf"
    errors = [abs(loss - want[0]) / (1 + abs(want[0]))]
    for key, one in want[1].items():
        mean = found[key].clone()
        dist.all_reduce(mean)
        errors += [float(((mean / group.size - one).abs() / (1 + one.abs())).max())] if one.numel() else []
    return f"{max(errors, key=lambda error: math.inf if math.isnan(error) else error):.0e}"


def short(error: Any) -> str:
    """Return the last line of an error, or what fits of it."""
    text = " ".join((str(error).strip() or repr(error)).splitlines()[-1].split())
    return re.sub(r"cannot run under context parallelism: ", "", text)[:200].replace("|", "/")


def compare(task: str, name: str, ranks: int = RANKS) -> Row:
    """Train a model both ways, and compare."""
    if name in IMPOSSIBLE:
        return Row(task, name, cells=(f"not compared: {IMPOSSIBLE[name]}",) * len(COLUMNS))
    try:
        return run_ranks(on_rank, ranks, task, name, timeout=LIMIT)[0]
    except RankFailure as error:
        return Row(task, name, cells=(f"failed: {short(error)}",) * len(COLUMNS))


def outcome(row: Row, column: int) -> str:
    """Return equal, refused, not compared or wrong."""
    cell = row.cells[column]
    for kind in ("refused", "not compared"):
        if cell.startswith(kind):
            return kind
    limit = WIDER.get(row.name, 0.0) or TOLERANCES[getattr(torch, row.dtype or "float64")]
    return "equal" if re.fullmatch(r"[\d.]+e[+-]\d+", cell) and float(cell) <= limit else "wrong"


# The page.

INTRODUCTION = """# Causal models and encoders of transformers on a context axis

Every causal model, masked language model and token classifier of transformers {version}, tiny and with random weights,
computes a loss and gradients of sequences that are spread over two context-parallel ranks, and in one process.
`python tools/context_models.py` writes this page; the tests compare some of the rows in every run and all of them in
`make test-all`.

- *ring*: with the strategy `ring`, whole sequences. *auto*: with the default strategy; *padded*: with padding before
  the tokens. A number is the largest |a - b| / (1 + |b|) of the loss and all gradients. Equal is up to {double:.0e} in
  float64, in which norms and softmaxes are kept here that models compute in fp32 otherwise, and up to {single:.0e} in
  float32.
- *split*: what ranks share under `auto`: *its attention*, which is replaced by one over ranks (ring, or by heads), or
  *its code*, which is given activations that stand for the whole ([how](context.md#any-other-code)).
- *kept*: bytes that a rank keeps for the backward, over those of one process; 50 % is the least of two ranks.

| of {total} | equal | refused | not compared |
|---|---|---|---|
{counts}
"""

HEADER = "| labels | model | ring | auto | auto, padded | split | kept | compared in |"


def counts(rows: Iterable[Row]) -> list[str]:
    """Return a line of the summary for each column."""
    lines = []
    for column, (strategy, given) in enumerate(COLUMNS):
        found = Counter(outcome(row, column) for row in rows)
        lines.append(f"| {strategy}, {given} | {found['equal']} | {found['refused']} | {found['not compared']} |")
    return lines


def line(row: Row) -> str:
    """Return a row of the table."""
    kept = "" if math.isnan(row.kept) else f"{row.kept:.0%}"
    return f"| {row.task} | {row.name} | {' | '.join(row.cells)} | {row.way} | {kept} | {row.dtype} |"


def page(rows: Sequence[Row]) -> str:
    """Return the whole page, in Markdown."""
    import transformers

    introduction = INTRODUCTION.format(
        version=transformers.__version__, total=len(rows), counts="\n".join(counts(rows)),
        double=TOLERANCES[torch.float64], single=TOLERANCES[torch.float32],
    )  # fmt: skip
    return "\n".join([introduction, HEADER, "|---" * 8 + "|", *map(line, rows)]) + "\n"


def main(arguments: list[str]) -> None:
    """Print the rows of some models, or write the page."""
    rows = []
    for task, name in models():
        if arguments and not {name, task, f"{task}:{name}"} & {*arguments}:
            continue
        began = time.monotonic()
        rows.append(compare(task, name))
        told = ", ".join(outcome(rows[-1], column) for column in range(len(COLUMNS)))
        print(f"{time.monotonic() - began:.1f} s, {told}: {line(rows[-1])}", flush=True)
    close_pools()
    print("\n".join(counts(rows)))
    if not arguments:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    import context_models  # the ranks find its functions under this name

    context_models.main(sys.argv[1:])
