"""``zeromesh evaluate``: figures of a run or a model, on any number of ranks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zeromesh import init_distributed, launch
from zeromesh.apps.evaluate.evaluated_model import LONGEST, EvaluatedModel
from zeromesh.apps.evaluate.held_out import figures, read_documents, score_documents
from zeromesh.apps.evaluate.multiple_choice import read_questions, score_questions
from zeromesh.apps.evaluate.scoring import Scorer
from zeromesh.apps.train.data.prepare_text import SUMMARY_FILE
from zeromesh.apps.train.data.sources import find_documents
from zeromesh.apps.train.data.token_store import PreparedData, load_summary
from zeromesh.apps.train.reference import require_reference
from zeromesh.apps.train.run_loss import HeldOut
from zeromesh.apps.train.screen import is_first, make_console
from zeromesh.apps.train.train_settings import Preference, TextData
from zeromesh.base.words import counted
from zeromesh.comm.environment import shutdown

Figures = dict[str, Any]
"""Result of an evaluation, as ``--json`` prints it."""


@dataclass(frozen=True)
class Wanted:
    """The measurements to make of a model."""

    data: tuple[str, ...] = ()  # files; of a run, none stands for its own held-out data
    choices: Path | None = None
    chat: bool = False  # questions are messages of a user
    tasks: tuple[str, ...] = ()  # of lm-evaluation-harness
    include: Path | None = None  # folder with tasks
    limit: int | None = None  # records of each task
    shots: int | None = None  # examples before each question of a task
    length: int | None = None  # tokens of a window; None is the default of the model
    stride: int | None = None  # tokens from window to window; None is the length
    batch: int = 4  # rows of a rank in one forward


def evaluate(model: EvaluatedModel, wanted: Wanted, ranks: int | None, as_json: bool) -> None:
    """Evaluate and print the figures on the first rank; raise ValueError if something cannot be evaluated."""
    check(model, wanted)
    count = ranks or model.ranks
    # The checkpoint by its name: a run that goes on may save another one before the last rank looks.
    results: list[Figures] = launch(run_rank, count, EvaluatedModel(model.path, model.checkpoint, model.dtype), wanted)
    if is_first():
        console = make_console()
        if as_json:
            console.print(json.dumps(_finite(results[0]), indent=2), soft_wrap=True)
        else:
            console.print("\n".join(lines(results[0])), soft_wrap=True)


def _finite(value: Any) -> Any:
    """Return a result with None for what is not finite, which JSON cannot write."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check(model: EvaluatedModel, wanted: Wanted) -> None:
    """Refuse what can be refused before a rank is started."""
    run = model.run
    assert model.checkpoint is not None or run is None  # raises if there is none
    if wanted.tasks and importlib.util.find_spec("lm_eval") is None:
        needed = "--tasks needs lm-evaluation-harness: pip install lm_eval"
        raise ValueError(f"{needed}; --choices FILE evaluates multiple choice without it")
    for option, value in (("--include", wanted.include), ("--limit", wanted.limit), ("--fewshot", wanted.shots)):
        if value is not None and not wanted.tasks:
            raise ValueError(f"{option} is for tasks of lm-evaluation-harness; name them with --tasks, or leave it out")
    if wanted.include is not None and not wanted.include.is_dir():
        raise ValueError(f"--include = {str(wanted.include)!r} is no folder; name one with YAML files of tasks")
    if wanted.chat and wanted.choices is None:
        raise ValueError("--chat is for --choices FILE; leave it out (chats in --data are recognised by their records)")
    if wanted.stride is not None and not wanted.data:
        raise ValueError("--stride is for the windows of --data FILES; leave it out")
    if model.longest is not None and (wanted.length or 0) > model.longest:
        raise ValueError(f"--length = {wanted.length} is longer than the {model.longest} tokens that the model takes")
    length = wanted.length or model.window
    if wanted.stride is not None and wanted.stride > length:
        raise ValueError(
            f"--stride = {wanted.stride} would leave tokens out: windows have {length}; set it to that or less"
        )
    if wanted.data or wanted.choices is not None or wanted.tasks:
        tokenizer = model.tokenizer
        if wanted.chat:
            tokenizer.prompt([{"role": "user", "content": "?"}])  # raises if there is no chat template
        if wanted.data:
            find_documents(wanted.data, ())
        if wanted.choices is not None:
            read_questions(wanted.choices)
    elif run is None:
        raise ValueError(
            f"{str(model.path)!r} is a model, which has no held-out data; name text with --data FILES, questions "
            "with --choices FILE, or tasks with --tasks NAMES"
        )
    else:
        _held_out(model)


def _held_out(model: EvaluatedModel) -> tuple[PreparedData, Preference | None]:
    """Return the run's own data, and how it learned from pairs; raise ValueError if nothing was held out."""
    run = model.run
    assert run is not None
    settings = run.settings()
    prepared, data = load_summary(run.text / SUMMARY_FILE), settings.data
    if prepared is None or data is None or not prepared.validation:
        raise ValueError(
            f"the run in {str(run.path)!r} has held nothing out to evaluate; name other text with --data FILES"
        )
    prepared = prepared.sampled(data)
    if settings.dpo is not None:
        require_reference(prepared)
    return prepared, settings.dpo


def run_rank(model: EvaluatedModel, wanted: Wanted) -> Figures:
    """Evaluate on one rank, and return the figures, the same on all. Collective."""
    # The layout of an evaluation is no news, and its settings are the run's.
    logger = logging.getLogger("zeromesh")
    level = logger.level
    logger.setLevel(logging.WARNING)
    init_distributed()
    try:
        torch.manual_seed(0)
        engine = model.engine()
        try:
            result: Figures = {
                "model": str(model.path),
                "checkpoint": model.checkpoint,
                "architecture": model.language.name,
                "dtype": str(model.compute_dtype).removeprefix("torch."),
                "ranks": engine.mesh.world_size,
                "device": engine.device.type,
            }
            length = wanted.length or model.window
            longest = wanted.length or model.longest or LONGEST
            scorer = Scorer(engine, model.language, wanted.batch, longest)
            if wanted.data:
                texts = read_documents(_reading(model, wanted.data), wanted.data, model.tokenizer)
                figures_of = score_documents(replace(scorer, longest=length), texts, length, wanted.stride or length)
                result["held_out"] = {"source": list(wanted.data), **figures_of}
            elif wanted.choices is None and not wanted.tasks:
                result["held_out"] = _own_held_out(model, scorer)
            if wanted.choices is not None:
                questions = read_questions(wanted.choices)
                result["choices"] = {
                    "source": str(wanted.choices),
                    **score_questions(scorer, model.tokenizer, questions, wanted.chat),
                }
            if wanted.tasks:
                from zeromesh.apps.evaluate.harness_model import HarnessModel, run_tasks

                adapter = HarnessModel(scorer, model.tokenizer, str(model.path))
                result["tasks"] = run_tasks(adapter, wanted.tasks, wanted.include, wanted.limit, wanted.shots)
                result["lm_eval"] = importlib.metadata.version("lm_eval")
            return result
        finally:
            engine.destroy()
    finally:
        logger.setLevel(level)
        shutdown()


def _reading(model: EvaluatedModel, files: Sequence[str]) -> TextData:
    """Return how to read records: with the keys of the run's data, if it is a run."""
    trained = None if model.run is None else model.run.settings().data
    keys = {"text_key", "prompt_key", "response_key", "messages_key"}
    chosen = {} if trained is None else trained.model_dump(include=keys)
    return TextData(train=tuple(files), **chosen)


def _own_held_out(model: EvaluatedModel, scorer: Scorer) -> Figures:
    """Return the score on the data that the run held out, in its samples, as its report has it. Collective."""
    prepared, dpo = _held_out(model)
    score = HeldOut(prepared, model.language, scorer.batch, dpo).score(scorer.engine)
    assert score is not None  # there is held-out data
    common = {"source": "the run's own", "documents": sum(part.documents for part in prepared.validation)}
    if dpo is not None:
        return common | {"loss_per_pair": score.loss, "accuracy": score.accuracy}
    labels = sum(part.labels for part in prepared.validation)
    values = figures(score.loss, labels, prepared.held_out_bytes)
    return common | values | {"bits_per_byte": score.bits_per_byte}


def lines(result: Figures) -> list[str]:
    """Return the figures as lines of text."""
    tag = "" if result["checkpoint"] is None else f", {result['checkpoint']}"
    ranks = counted(result["ranks"], "rank")
    text = [f"{result['model']}{tag}: {result['architecture']} in {result['dtype']} on {ranks} ({result['device']})"]
    if held_out := result.get("held_out"):
        source = held_out["source"] if isinstance(held_out["source"], str) else ", ".join(held_out["source"])
        text.append(f"held-out text ({source}): {counted(held_out['documents'], 'document')}")
        if "loss" in held_out:
            text.append(f"  loss           {held_out['loss']:.4f} nats per token, {held_out['tokens']:,} tokens")
            text.append(f"  perplexity     {held_out['perplexity']:.4g} per token")
        else:
            text.append(f"  loss           {held_out['loss_per_pair']:.4f} nats per pair")
            text.append(f"  preferred      the chosen answer of {held_out['accuracy']:.1%} of the pairs")
        if held_out.get("bits_per_byte") is not None:
            text.append(f"  bits per byte  {held_out['bits_per_byte']:.4f}, {held_out['bytes']:,} bytes of UTF-8")
    if choices := result.get("choices"):
        text.append(f"multiple choice ({choices['source']}): {counted(choices['questions'], 'question')}")
        for name, key in (("accuracy", "accuracy"), ("by length", "accuracy_by_length")):
            error = choices[f"{key}_error"]
            beside = "" if error is None else f" ± {error:.1%}"
            text.append(f"  {name:<14} {choices[key]:.1%}{beside}")
        text.append(f"  {'chance':<14} {choices['chance']:.1%}")
    for name, metrics in result.get("tasks", {}).items():
        text.append(f"{name} (lm-evaluation-harness {result['lm_eval']})")
        for metric, value in metrics.items():
            if not metric.endswith(("_stderr", "_stderr,none")):
                error = metrics.get(f"{metric}_stderr")
                text.append(f"  {metric:<14} {value:.6g}" + (f" ± {error:.4f}" if error is not None else ""))
    return text
