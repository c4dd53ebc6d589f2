"""Chats by the template of a transformers tokenizer: their ids, and which of them the assistant has said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Message = dict[str, Any]

STATEMENTS = re.compile(r"{%[-+]?\s*(\w+)")
"""The first words of the statements of a chat template."""


def render(tokenizer: Any, messages: Sequence[Message]) -> tuple[Ids, NDArray[np.bool_]]:
    """A chat by the tokenizer's template: its own marks say what the assistant has said, else its beginnings do."""
    _require_template(tokenizer)
    if "generation" in STATEMENTS.findall(tokenizer.get_chat_template()):
        _require_text(tokenizer, messages)
        found = tokenizer.apply_chat_template(list(messages), return_dict=True, return_assistant_tokens_mask=True)
        return np.array(found["input_ids"], dtype=np.int64), np.array(found["assistant_masks"], dtype=bool)
    whole = _render_ids(tokenizer, messages, False)
    mask = np.zeros(len(whole), dtype=bool)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render_ids(tokenizer, messages[:place], True) if place else np.empty(0, dtype=np.int64)
            after = _render_ids(tokenizer, messages[: place + 1], False)
            if not (place and _begins(after, before) and _begins(whole, after)):
                raise ValueError(
                    f"messages[{place}]: where the assistant's turn is cannot be told from the tokenizer's chat "
                    "template, since a chat up to there is not a beginning of the whole one; mark what the assistant "
                    "says in the template with {% generation %} and {% endgeneration %}"
                )
            mask[len(before) : len(after)] = True
    return whole, mask


def render_prompt(tokenizer: Any, messages: Sequence[Message]) -> Ids:
    """A chat by the tokenizer's template, up to where the assistant speaks next."""
    _require_template(tokenizer)
    return _render_ids(tokenizer, messages, True)


def _require_template(tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; name one that has, or put chat_template.jinja beside it")


def _render_ids(tokenizer: Any, messages: Sequence[Message], prompt: bool) -> Ids:
    found = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=prompt, return_dict=True, sanitize_control_tokens=True
    )
    return np.array(found["input_ids"], dtype=np.int64)


def _begins(whole: Ids, part: Ids) -> bool:
    return len(part) <= len(whole) and bool((whole[: len(part)] == part).all())


def _require_text(tokenizer: Any, messages: Sequence[Message]) -> None:
    """Where a template has marks, transformers cannot tell a special token in a message from one of the template's."""
    for place, message in enumerate(messages):
        for token in tokenizer.all_special_tokens:
            if token in str(message.get("content", "")):
                raise ValueError(
                    f"messages[{place}].content has {token!r}, which is a special token of the tokenizer; take it out"
                )
