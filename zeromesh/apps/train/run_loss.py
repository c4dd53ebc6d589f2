"""Loss of a run in training and evaluation, the score on held-out text, and trials of a model's attention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from zeromesh import Engine
from zeromesh.apps.train.data.ordered_loader import NO_LABEL, Batch, evaluation_batches
from zeromesh.apps.train.data.token_store import PreparedData
from zeromesh.apps.train.model import LanguageModel, Transformer
from zeromesh.apps.train.train_settings import Preference
from zeromesh.checkpoint.weights.export import plain_model
from zeromesh.engine.batches import WithLoss

AT_ONCE = 32  # micro-batches per evaluation call: a pipeline fills and drains once for them, and holds all of them
PROBE = 4  # tokens of each of the two documents of a trial


@dataclass(frozen=True)
class Weighted(WithLoss):
    """A micro-batch whose loss is the sum over its labels, in nats, times a factor."""

    batch: Batch
    language: LanguageModel
    engine: Engine
    factor: float  # the same on all ranks

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return a scalar in fp32, or in fp64 for a model in fp64."""
        logits, labels = self.language.logits(model, self.batch), self.batch.labels
        spread = self.engine.context_parallel  # ranks over which its sequences are spread, if they are
        # A sum over the vocabulary in 16 bits would lose most digits.
        wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        if spread is None:
            return F.cross_entropy(wide, labels.flatten(), ignore_index=NO_LABEL, reduction="sum") * self.factor
        # Ranks that share the sequences get the same scalar; the gradient of each is that of its own tokens.
        count = int((labels != NO_LABEL).sum())
        if not count:
            return wide.sum() * 0  # with a graph, since all ranks must run the same backward
        local_labels = spread.part(labels)
        mean = spread.mean_loss(F.cross_entropy(wide, local_labels.flatten(), ignore_index=NO_LABEL), local_labels)
        return mean * count * self.factor


@dataclass(frozen=True)
class Preferred(WithLoss):
    """A micro-batch of two answers each, whose loss is the sum of the DPO losses of its pairs, times a factor.

    Source: Rafailov et al., "Direct Preference Optimization", 2023; label smoothing: Mitchell, "A note on DPO with
    noisy preferences", 2023.
    """

    batch: Batch
    language: LanguageModel
    dpo: Preference
    factor: float  # the same on all ranks
    note: Callable[[torch.Tensor], None]  # is given the log-likelihoods of both answers, shape (rows, 2)

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return a scalar in fp32, or in fp64 for a model in fp64; 0 without a reference."""
        rows = Batch(self.batch.tokens.flatten(0, 1), labels := self.batch.labels.flatten(0, 1))
        logits = self.language.logits(model, rows)
        wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide, labels.flatten(), ignore_index=NO_LABEL, reduction="none")
        answers = -losses.view(labels.shape).sum(1).view(-1, 2)
        self.note(answers.detach())
        if self.batch.reference is None:
            return answers.sum() * 0
        margin = self.dpo.beta * margins(answers, self.batch.reference)
        smoothing = self.dpo.label_smoothing
        each = -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing
        return (each * are_pairs(self.batch)).sum() * self.factor


def margins(answers: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return by how much the chosen answer is preferred more than by the reference, in nats, shape ``(rows,)``."""
    chosen, rejected = (answers - reference).unbind(1)
    return chosen - rejected


def are_pairs(batch: Batch) -> torch.Tensor:
    """Return True for each row of two answers, and False for filling, shape ``(rows,)``."""
    return (batch.labels != NO_LABEL).any(-1).all(-1)


def weighted(
    engine: Engine,
    language: LanguageModel,
    batches: Sequence[Batch],
    dpo: Preference | None = None,
    note: Callable[[torch.Tensor], None] = lambda answers: None,
) -> tuple[list[Weighted] | list[Preferred], int]:
    """Return micro-batches whose mean loss in the engine is nats per label, and the labels of all ranks. Collective.

    With ``dpo``, it is nats per pair, and the number is that of pairs; see ``Preferred.note``.
    """
    world = engine.mesh.group("world")
    learned = (batch.labels != NO_LABEL if dpo is None else are_pairs(batch) for batch in batches)
    counts = torch.tensor([sum(int(entries.sum()) for entries in learned)])
    # Ranks that share a batch count the same labels.
    labels = int(world.exchange(counts).sum()) * engine.data_size // world.size
    # The engine takes the mean over data ranks and micro-batches, which are equally many on all ranks.
    factor = engine.data_size * len(batches) / max(1, labels)
    if dpo is not None:
        return [Preferred(batch, language, dpo, factor, note) for batch in batches], labels
    return [Weighted(batch, language, engine, factor) for batch in batches], labels


@dataclass(frozen=True)
class Score:
    """Evaluation on held-out text."""

    loss: float  # nats per label, or per pair
    bits_per_byte: float | None  # ends of text included; None if the bytes are unknown
    accuracy: float | None = None  # share of pairs whose chosen answer is preferred more than by the reference


@dataclass(frozen=True)
class HeldOut:
    """Held-out text in micro-batches of ``rows``."""

    prepared: PreparedData
    language: LanguageModel
    rows: int
    dpo: Preference | None = None

    def score(self, engine: Engine, batches: int | None = None) -> Score | None:
        """Return the score on the first ``batches`` micro-batches of every rank, or on all. Collective."""
        total, count, preferred = 0.0, 0, torch.zeros(2)  # pairs on this rank that are ranked right, and all
        length = self.language.sequence_length
        local_batches = evaluation_batches(self.prepared, length, self.rows, engine.data_rank, engine.data_size)
        local_batches = islice(local_batches, batches)
        while some := list(islice(local_batches, AT_ONCE)):
            answers: list[torch.Tensor] = []
            micro_batches, labels = weighted(engine, self.language, some, self.dpo, answers.append)
            total += labels * float(engine.eval_batch(iter(micro_batches), num_micro_batches=len(some)))
            count += labels
            for batch, pair in zip(some, answers, strict=False):  # stages of a pipeline but the last have no answers
                assert batch.reference is not None
                is_right = margins(pair.cpu(), batch.reference)[are_pairs(batch)] > 0
                preferred += torch.tensor([float(is_right.sum()), len(is_right)])
        if not count:
            return None
        if self.dpo is not None:
            right, pairs = engine.mesh.group("world").exchange(preferred).sum(0).tolist()
            return Score(loss=total / count, bits_per_byte=None, accuracy=right / pairs)
        # Bytes per label are the mean over all held-out text, also if a part of it is evaluated.
        size = self.prepared.held_out_bytes
        labels = sum(token_set.labels for token_set in self.prepared.validation)
        bits = total / count / math.log(2) * labels / size if size else None
        return Score(loss=total / count, bits_per_byte=bits)


@dataclass(frozen=True)
class _Trial(WithLoss):
    """Two rows of tokens, whose loss is 1 if the model's predictions for them differ in some places, else 0."""

    # A loss, because the last stage of a pipeline alone has the predictions, and shares only that.

    batch: Batch
    language: LanguageModel
    places: slice

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        logits = self.language.logits(model, self.batch)[:, self.places].float()
        same = torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-4)
        return torch.zeros((), device=logits.device) if same else torch.ones((), device=logits.device)

    def differs(self, engine: Engine) -> bool:
        """Return whether the predictions differ on some rank. Collective."""
        spread = engine.context_parallel
        with nullcontext() if spread is None else spread.paused():  # the tokens may be too few to be spread
            return bool(engine.eval_batch(iter([self]), num_micro_batches=1))


def require_document_attention(engine: Engine, language: LanguageModel, vocabulary: int) -> None:
    """Raise ValueError if tokens of a document matter in the next one of its row. Collective."""
    leaks = ValueError(
        f"data.document_attention: {language.name} attends across documents whatever positions it is given; set it to "
        'false, and data.packing to "pad" where records must not see each other'
    )
    # A trial, since rotary or learned positions alone do not show it, and not every model looks at them.
    if isinstance(language, Transformer):
        forward = plain_model(engine.module).forward
        if "position_ids" not in inspect.signature(forward).parameters:
            raise leaks
    second = torch.arange(PROBE) % vocabulary
    rows = [torch.cat([torch.full((PROBE,), token), second]) for token in (0, vocabulary - 1)]
    tokens = torch.stack(rows)
    documents = torch.tensor([0] * PROBE + [1] * PROBE).expand_as(tokens)
    positions = torch.arange(PROBE).repeat(2).expand_as(tokens)
    if _Trial(Batch(tokens, tokens, positions, documents), language, slice(PROBE, None)).differs(engine):
        raise leaks
    spread = engine.context_parallel
    if spread is not None and not isinstance(language, Transformer):
        spread.follow_code(ValueError(f"{language.name} hides the documents of a sample from each other"))


def require_causal(engine: Engine, language: LanguageModel, vocabulary: int) -> None:
    """Raise ValueError if a token matters to the predictions before it, as in BERT. Collective."""
    # Such a model would learn to copy its labels.
    tokens = torch.stack([torch.arange(PROBE) % vocabulary] * 2)
    tokens[1, -1] = vocabulary - 1 - tokens[1, -1]
    if _Trial(Batch(tokens, tokens), language, slice(-1)).differs(engine):
        raise ValueError(
            f"huggingface.path: {language.name} is not a causal model: what it predicts depends on later tokens; "
            "choose a model that generates text (examples/bert_mlm.py trains on masked tokens)"
        )
