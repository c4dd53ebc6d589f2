"""Loss on held-out files: their documents as a model reads them, in windows that may overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from zeromesh.apps.evaluate.scoring import Row, Scorer
from zeromesh.apps.train.data.encode import Encoder, grouped
from zeromesh.apps.train.data.ordered_loader import NO_LABEL
from zeromesh.apps.train.data.records import Tokens
from zeromesh.apps.train.data.sources import Part, find_documents, look
from zeromesh.apps.train.data.text_formats import INDEXED, Document, portions
from zeromesh.apps.train.data.tokenizer import Ids, TextTokenizer
from zeromesh.apps.train.train_settings import TextData


def figures(loss: float, tokens: int, size: int) -> dict[str, Any]:
    """Return the loss in nats per token, the perplexity per token, and bits per byte; None where bytes are unknown."""
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * tokens / size / math.log(2) if size else None,
        "tokens": tokens,
        "bytes": size or None,
    }


def read_documents(data: TextData, files: Sequence[str], tokenizer: TextTokenizer) -> Iterator[Tokens]:
    """Yield the documents of files, as ``data`` says how to read them; raise ValueError if one cannot be read."""
    skipped: list[Document] = []
    part = Part("evaluation", f"--data = {list(files)}", (tuple(find_documents(files, data.suffixes)),), 1.0)
    documents = look(data, part, skipped)
    if any(document.kind == INDEXED for document in documents):
        raise ValueError(f"{part.wanted} is tokens, whose text is unknown; name the files that they were made from")
    if any(document.kind == "preference" for document in documents):
        raise ValueError(
            f"{part.wanted} has pairs of answers, which a run with a section dpo holds out itself: leave --data out "
            "for it, or name files with one answer to each prompt"
        )
    encoder = Encoder(tokenizer, data, None)
    ids: list[Ids] = []
    size = 0
    for encoded in map(encoder.encode, grouped(chain.from_iterable(map(portions, documents)))):
        ends = np.cumsum(encoded.lengths, dtype=np.int64)
        for place, stop in enumerate(ends):
            start = stop - encoded.lengths[place]
            ids.append(encoded.ids[start:stop].astype(np.int64))
            size += int(encoded.sizes[place])
            if not encoded.last[place]:
                continue
            document = np.concatenate(ids)
            if encoded.mask is None:
                # The end of a text is the tokenizer's, and no part of the text.
                yield Tokens(document[:-1], None, size)
            else:
                yield Tokens(document, encoded.mask[start:stop].astype(bool), size)
            ids, size = [], 0


def windows(document: Tokens, length: int, stride: int) -> Iterator[Row]:
    """Yield rows of at most ``length`` tokens that score each token but the first once.

    A window begins ``stride`` tokens after the one before it, and scores what that one has not; the last reaches back
    as far as a window can. With ``stride = length`` windows share no token but the last of one and the first of the
    next, which predicts the token after it.
    """
    labels = document.ids[1:].copy()
    if document.mask is not None:
        labels[~document.mask[1:]] = NO_LABEL
    scored, count = 0, len(labels)
    while scored < count:
        stop = min(count, scored + stride) if scored else min(count, length)
        start = max(0, stop - length)
        row = labels[start:stop].copy()
        row[: scored - start] = NO_LABEL
        yield Row(document.ids[start:stop], row)
        scored = stop


def score_documents(scorer: Scorer, documents: Iterator[Tokens], length: int, stride: int) -> dict[str, Any]:
    """Return the figures of all documents; raise ValueError if no token can be scored. Collective."""
    count = size = tokens = 0

    def rows() -> Iterator[Row]:
        nonlocal count, size, tokens
        for document in documents:
            count, size = count + 1, size + document.size
            for row in windows(document, length, stride):
                if scored := int((row.labels != NO_LABEL).sum()):
                    tokens += scored
                    yield row

    likelihood = sum(value for value, _ in scorer.score(rows()))
    if not tokens:
        raise ValueError("--data has no token to score: a token is predicted from those before it, and there is one")
    return figures(-likelihood / tokens, tokens, size) | {"documents": count, "window": length, "stride": stride}
