"""Adapter for lm-evaluation-harness, which must be installed to import this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from zeromesh.apps.evaluate.held_out import windows
from zeromesh.apps.evaluate.multiple_choice import encode_pair
from zeromesh.apps.evaluate.scoring import Row, Scorer, continuation_row
from zeromesh.apps.train.data.ordered_loader import NO_LABEL
from zeromesh.apps.train.data.records import Tokens
from zeromesh.apps.train.data.tokenizer import TextTokenizer

DRAWN = frozenset({"until", "do_sample", "temperature", "max_gen_toks"})
"""Arguments of a generation that are followed."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model on all ranks. Each rank evaluates all tasks, as one process for the harness; forwards are shared."""

    def __init__(self, scorer: Scorer, tokenizer: TextTokenizer, name: str) -> None:
        super().__init__()
        self.scorer, self.text, self._name = scorer, tokenizer, name

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        return self.text.end

    @property
    def prefix_token_id(self) -> int:
        """Id before the first of a text."""
        return self.text.end if self.text.begin is None else self.text.begin

    @property
    def tokenizer_name(self) -> str:
        """Name of the model in the harness's cache of requests."""
        return self._name

    @property
    def max_length(self) -> int:
        """Tokens of the longest input."""
        return self.scorer.longest

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, after the one that begins a text unless ``add_special_tokens`` is False."""
        begin = [] if self.text.begin is None or add_special_tokens is False else [self.text.begin]
        return [*begin, *self.text.encode([string])[0].tolist()]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        return encode_pair(self.text, context, continuation)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [continuation_row(context, continuation, self.max_length) for _, context, continuation in requests]
        values = list(self.scorer.score(rows))
        return [
            (likelihood, int(hits) == int((row.labels != NO_LABEL).sum()))
            for row, (likelihood, hits) in zip(rows, values, strict=True)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, from its first token on, which follows the one before a text."""
        rows, owners = [], []
        for number, request in enumerate(requests):
            ids = np.array([self.prefix_token_id, *self.tok_encode(request.args[0])], dtype=np.int64)
            for row in windows(Tokens(ids, None, 0), self.max_length, self.max_length):
                rows.append(row)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, values in zip(owners, self.scorer.score(rows), strict=True):
            totals[owner] += values[0]
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to one of its stop sequences."""
        # All that have the same limits at once; without kept keys and values, which not every layout could share.
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            options = normalize_gen_kwargs(dict(requests[numbers[0]].args[1]))
            contexts = [requests[number].args[0] for number in numbers]
            for number, text in zip(numbers, self._generate(contexts, options), strict=True):
                texts[number] = text
        return texts

    def _generate(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        others = {key: value for key, value in options.items() if key not in DRAWN and value is not None}
        if others or options["temperature"]:
            raise ValueError(
                f"the task asks for {dict(options)}, and texts are continued by the likeliest token; set do_sample to "
                f"false in its generation_kwargs{', and leave out ' + ', '.join(others) if others else ''}"
            )
        limit = options["max_gen_toks"]
        if limit >= self.max_length:
            raise ValueError(
                f"the task generates up to {limit} tokens, and the model takes {self.max_length}; lower max_gen_toks "
                "in its generation_kwargs"
            )
        stops = [stop for stop in options["until"] if stop]
        begins = [self.tok_encode(context)[-(self.max_length - limit) :] for context in contexts]
        added: list[list[int]] = [[] for _ in contexts]
        texts, open_places = [""] * len(contexts), list(range(len(contexts)))
        for _ in range(limit):
            if not open_places:
                break
            rows = [_next_row([*begins[place], *added[place]]) for place in open_places]
            following = [int(values[0]) for values in self.scorer.score(rows, self._likeliest)]
            still_open = []
            for place, token in zip(open_places, following, strict=True):
                if token == self.text.end:
                    continue
                added[place].append(token)
                texts[place] = self.text.decode(begins[place] + added[place])[len(self.text.decode(begins[place])) :]
                if not any(stop in texts[place] for stop in stops):
                    still_open.append(place)
            open_places = still_open
        for stop in stops:
            texts = [text.split(stop)[0] for text in texts]
        return texts

    def _likeliest(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Models may have more entries than the tokenizer, which have no text.
        places = (labels != NO_LABEL).int().argmax(1)
        last = logits[torch.arange(len(labels), device=logits.device), places]
        return last[:, : self.text.size].float().argmax(-1, keepdim=True)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Refuse chats: the harness would have their text encoded, where special tokens are plain text."""
        raise ValueError("chats are evaluated by zeromesh evaluate --choices FILE --chat")


def _next_row(ids: Sequence[int]) -> Row:
    labels = np.full(len(ids), NO_LABEL, dtype=np.int64)
    labels[-1] = 0  # marks the place of the next token
    return Row(np.array(ids, dtype=np.int64), labels)


def run_tasks(
    model: HarnessModel, tasks: Sequence[str], include: Path | None, limit: int | None, shots: int | None
) -> dict[str, Any]:
    """Return the metrics of each task, as the harness computes them; raise ValueError for unknown tasks. Collective."""
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise ValueError(
            f"--tasks: lm-evaluation-harness has no task {', '.join(map(repr, unknown))}; lm-eval ls tasks lists those "
            "that it has, and --include FOLDER adds YAML files of your own"
        )
    result = simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        num_fewshot=shots,
        log_samples=False,
        bootstrap_iters=0 if model.scorer.engine.mesh.rank else 1000,
    )
    assert result is not None
    return {
        name: {
            key.removesuffix(",none"): value
            for key, value in values.items()
            if isinstance(value, int | float) and key != "sample_len"
        }
        for name, values in result["results"].items()
    }
