"""Chats as ids, by the template of a transformers tokenizer, with a mask of what the assistant says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None  # schemas of the functions that the assistant may call

STATEMENTS = re.compile(r"{%[-+]?\s*(\w+)")  # finds the first words of the statements in a chat template


def render(tokenizer: Any, messages: Sequence[Message], tools: Tools = None) -> tuple[Ids, NDArray[np.bool_]]:
    """Return the ids of a chat, and the mask of those that the assistant says, bool, of the same shape."""
    _require_template(tokenizer)
    template = tokenizer.get_chat_template(tools=tools)
    calls = any(message.get("tool_calls") for message in messages)
    for key, value in (("tools", tools), ("tool_calls", calls)):
        if value and key not in template:
            raise ValueError(
                f"has {key}, which the tokenizer's chat template does not write, so they would be missing from what is "
                "learned; take them out, or name a tokenizer whose template writes them"
            )
    # transformers warns and returns an empty mask for a template without marks, so the template is searched for them.
    if "generation" in STATEMENTS.findall(template):
        _require_text(tokenizer, messages, tools)
        found = tokenizer.apply_chat_template(
            list(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        return np.array(found["input_ids"], dtype=np.int64), np.array(found["assistant_masks"], dtype=bool)
    # Without marks, the assistant says what each of its turns adds to the chat before it. This holds only if the chat
    # up to there is a beginning of the whole one, which a template may well break, so it is compared.
    whole = _render_ids(tokenizer, messages, False, tools)
    mask = np.zeros(len(whole), dtype=bool)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render_ids(tokenizer, messages[:place], True, tools) if place else np.empty(0, dtype=np.int64)
            after = _render_ids(tokenizer, messages[: place + 1], False, tools)
            if not (place and _begins(after, before) and _begins(whole, after)):
                raise ValueError(
                    f"messages[{place}]: where the assistant's turn is cannot be found with the tokenizer's chat "
                    "template, since a chat up to there is not a beginning of the whole one; mark what the assistant "
                    "says in the template with {% generation %} and {% endgeneration %}"
                )
            mask[len(before) : len(after)] = True
    return whole, mask


def render_prompt(tokenizer: Any, messages: Sequence[Message]) -> Ids:
    """Return the ids of a chat up to the next turn of the assistant."""
    _require_template(tokenizer)
    return _render_ids(tokenizer, messages, True)


def _require_template(tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; name one that has, or put chat_template.jinja beside it")


def _render_ids(tokenizer: Any, messages: Sequence[Message], prompt: bool, tools: Tools = None) -> Ids:
    found = tokenizer.apply_chat_template(
        list(messages), tools=tools, add_generation_prompt=prompt, return_dict=True, sanitize_control_tokens=True
    )
    return np.array(found["input_ids"], dtype=np.int64)


def _begins(whole: Ids, part: Ids) -> bool:
    return len(part) <= len(whole) and bool((whole[: len(part)] == part).all())


def _require_text(tokenizer: Any, messages: Sequence[Message], tools: Tools) -> None:
    # With marks, transformers does not tell special tokens in messages from those of the template, so that a message
    # could end its own turn.
    special = tokenizer.all_special_tokens
    parts = [(f"messages[{place}].{key}", message[key]) for place, message in enumerate(messages) for key in message]
    for name, value in [*parts, *([("tools", tools)] if tools else [])]:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for token in special if not name.endswith(".role") else ():
            if token in text:
                raise ValueError(f"{name} has {token!r}, which is a special token of the tokenizer; take it out")
