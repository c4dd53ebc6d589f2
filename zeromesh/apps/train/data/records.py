"""Kinds of records: how each becomes token ids, and which of the ids are labels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeromesh.apps.train.data.text_formats import OF_AN_ARRAY
from zeromesh.apps.train.data.tokenizer import Ids, TextTokenizer, template_errors
from zeromesh.apps.train.train_settings import TextData
from zeromesh.base.words import show, some

RAW = "raw"  # value of data.format, of files that are read as plain text
TOOLS = "tools"  # key of the schemas of functions that the assistant of a chat may call

# Keys, in any letter case, where the settings have the default; of several, the first that a record has. "inputs" are
# those of the text that follows an instruction, as in Alpaca and Dolly, and "speakers" have the roles of ShareGPT's.
NAMES: dict[str, Any] = json.loads(Path(__file__).with_name("record_names.json").read_text(encoding="utf-8"))


class Chat(NamedTuple):
    """A chat, and the functions that the assistant may call."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class Tokens(NamedTuple):
    """Tokens of a record, or of a piece of a text."""

    ids: Ids
    mask: NDArray[np.bool_] | None  # True for labels, shape (tokens,); None if all are
    size: int  # bytes of text that the labels stand for


class RecordKind(NamedTuple):
    """A row of ``KINDS``. ``read`` and ``encode`` raise ValueError for a wrong record."""

    keys: Callable[[TextData, Mapping[str, Any]], tuple[str, ...]]  # keys that a record must have under the settings
    read: Callable[[TextData, Mapping[str, Any]], Any]  # turns a record into an input of encode
    encode: Callable[[TextTokenizer, Sequence[Any]], Iterator[Tokens]]  # yields the tokens of each input
    texts: Callable[[Any], list[str]]  # texts of an input that a tokenizer is trained on
    packed: bool  # records stay whole in samples; otherwise they form a stream
    sequences: int = 1  # of each record, which encode yields one after the other


def kind_of(data: TextData, record: Any) -> str:
    """Return the first kind in the table whose keys the record has; raise ValueError if there is none."""
    _require_object(record)
    # Text comes last: records of the other kinds may have that key, too.
    for name, kind in KINDS.items():
        if data.format in (None, RAW, name) and set(kind.keys(data, record)) <= record.keys():
            return name
    wanted = [KINDS[data.format]] if data.format in KINDS else list(KINDS.values())
    keys = " or ".join(" and ".join(map(repr, kind.keys(data, record))) for kind in wanted)
    raise ValueError(
        f"has the keys {list(record)}, and must have {keys}, or other common names (docs/data.md); name yours, as "
        "with --set data.prompt_key=KEY --set data.response_key=KEY, --set data.text_key=KEY, or --set "
        "data.messages_key=KEY"
    )


def describe_keys(data: TextData, name: str, record: Mapping[str, Any]) -> str:
    """Return which keys of a record are read, and which are not."""
    keys = [*KINDS[name].keys(data, record)]
    if name == "response" and (extra := _input_key(keys[0], record)):
        keys.insert(1, extra)
    if name == "preference" and data.prompt_key in record and data.prompt_key not in keys:
        keys.insert(0, data.prompt_key)  # of answers that do not repeat it
    rest = some([repr(key) for key in record if key not in (*keys, TOOLS, "system")])
    words = list(map(repr, keys))
    if name == "preference":
        words[-2:] = [f"{words[-2]} rather than {words[-1]}"]
    read = f"{' + '.join(words[:-1])} -> " if len(words) > 1 else ""
    return f"{read}{words[-1]}" + (f"; not read: {rest}" if rest else "")


def read_record(data: TextData, name: str, record: Any) -> Any:
    """Return a record as the ``encode`` of its kind takes it; raise ValueError if it is wrong or of another kind."""
    _require_object(record)
    kind = KINDS[name]
    missing = [key for key in kind.keys(data, record) if key not in record]
    if missing:
        raise ValueError(
            f"has the keys {list(record)} and lacks {', '.join(map(repr, missing))}; all records of a source are "
            f"of one kind, here {name!r}, as its first record or data.format says: put others into sources of their own"
        )
    return kind.read(data, record)


def share_of(record: Any) -> float:
    """Return a number in [0, 1) that depends on the content of the record only."""
    # Of the content, so that a record stays on its side of the split when others come or go.
    text = json.dumps(record, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53  # as many bits as a float has: 64 could round to 1.0


def encode_text(tokenizer: TextTokenizer, texts: Sequence[str]) -> Iterator[Tokens]:
    """Yield the tokens of pieces of text, without begin and end tokens."""
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        yield Tokens(ids, None, len(text.encode()))


def _require_object(record: Any) -> None:
    if not isinstance(record, Mapping):
        hint = OF_AN_ARRAY if isinstance(record, list) else ""
        raise ValueError(f"is {show(record)}, and must be an object with keys: {{...}}{hint}")


def _string(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} = {show(value)} must be a string")
    try:
        value.encode()  # tokenizers take UTF-8, where half a pair is an error without a place
    except UnicodeEncodeError:
        raise ValueError(f"{key} has half of a surrogate pair, {show(value)}, which is no character") from None
    return value


def _matching(record: Mapping[str, Any], key: str) -> str:
    """Return the key of a record, perhaps in another letter case; ``key`` itself if there is none."""
    return key if key in record else next((name for name in record if name.lower() == key), key)


def _text_key(data: TextData, record: Mapping[str, Any]) -> str:
    return _matching(record, data.text_key)


def _messages_key(data: TextData, record: Mapping[str, Any]) -> str:
    names = NAMES["chats"] if data.messages_key == NAMES["chats"][0] else (data.messages_key,)
    keys = [_matching(record, name) for name in names]
    return next((key for key in keys if key in record), keys[0])


def _pair(data: TextData, record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the keys of the prompt and of the response."""
    prompt = None if data.prompt_key == NAMES["pairs"][0][0] else data.prompt_key
    pairs = [(prompt or first, data.response_key or second) for first, second in NAMES["pairs"]]
    pairs = [(_matching(record, first), _matching(record, second)) for first, second in pairs]
    return next((pair for pair in pairs if set(pair) <= record.keys()), pairs[0])


def _input_key(prompt_key: str, record: Mapping[str, Any]) -> str | None:
    """Return the key of the text that an instruction is about; None without one."""
    if prompt_key.lower() != "instruction":
        return None
    return next((key for key in (_matching(record, name) for name in NAMES["inputs"]) if key in record), None)


def _read_response(data: TextData, record: Mapping[str, Any]) -> tuple[str, str]:
    prompt_key, response_key = _pair(data, record)
    if isinstance(record[prompt_key], list | Mapping):
        raise ValueError(
            f"{prompt_key} = {show(record[prompt_key])} must be a string; write messages of both sides as one list "
            "under 'messages'"
        )
    prompt, response = _string(record, prompt_key), _string(record, response_key)
    extra = _input_key(prompt_key, record)
    if extra is not None and record[extra]:
        prompt = f"{prompt}\n\n{_string(record, extra)}"
    return prompt, response


def _encode_responses(tokenizer: TextTokenizer, pairs: Sequence[tuple[str, str]]) -> Iterator[Tokens]:
    prompts, responses = (tokenizer.encode([pair[side] for pair in pairs]) for side in (0, 1))
    for pair, prompt, response in zip(pairs, prompts, responses, strict=True):
        # Encoded apart, or a token could hold the end of the prompt and the beginning of the response. The end of the
        # text is a label, too: a model has to learn where a response ends.
        ids = tokenizer.bounded(np.concatenate([prompt, response]))
        yield Tokens(ids, np.arange(len(ids)) >= len(ids) - len(response) - 1, len(pair[1].encode()))


def _read_chat(data: TextData, record: Mapping[str, Any]) -> Chat:
    key = _messages_key(data, record)
    messages = record[key]
    if isinstance(messages, str) and messages.startswith("["):  # in a table of text
        messages = _of_json(messages, key)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{key} = {show(messages)} must be a list of at least one message")
    read = [_read_message(f"{key}[{place}]", message) for place, message in enumerate(messages)]
    system = record.get("system")
    if key != NAMES["chats"][0] and system and isinstance(system, str) and read[0]["role"] != "system":
        read.insert(0, {"role": "system", "content": system})
    if all(message["role"] != "assistant" for message in read):
        raise ValueError(
            f"{key} has no turn of the assistant, so nothing can be learned from it; add one, or take it out"
        )
    return Chat(read, _read_tools(record.get(TOOLS)))


def _read_tools(value: Any) -> list[dict[str, Any]] | None:
    # Tables hold them as JSON in strings, since all objects of a column need the same keys.
    tools = _of_json(value, TOOLS)
    if tools is None or tools == []:
        return None
    read: list[Any] = [_of_json(tool, TOOLS) for tool in tools] if isinstance(tools, list) else [None]
    if not all(isinstance(tool, Mapping) for tool in read):
        raise ValueError(
            f"{TOOLS} = {show(value)} must be a list of objects, each the schema of a function, or JSON of it"
        )
    return read


def _of_json(value: Any, key: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{key} = {show(value)} is not JSON ({error})") from None


def _read_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} = {show(message)} must be an object with role and content")
    if "from" in message and "role" not in message:
        speaker = str(message["from"])
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": NAMES["speakers"].get(speaker, speaker), "content": message.get("value"), **others}
    for key in ("role", "content"):
        if key not in message and not (key == "content" and message.get("tool_calls")):
            raise ValueError(f"{name} = {show(dict(message))} lacks {key!r}; a message has role and content")
    if message["role"] not in NAMES["roles"]:
        raise ValueError(f"{name}.role = {show(message['role'])} must be one of {', '.join(NAMES['roles'])}")
    # Tables give each message the keys of all messages, with None for those that it does not have.
    entries = {key: value for key, value in message.items() if value is not None}
    if "content" in entries or not entries.get("tool_calls"):
        _string({f"{name}.content": message["content"]}, f"{name}.content")
    return entries


def _encode_chats(tokenizer: TextTokenizer, chats: Sequence[Chat]) -> Iterator[Tokens]:
    for chat in chats:
        with template_errors("it"):
            ids, mask = tokenizer.chat(chat.messages, chat.tools)
        if not mask[1:].any():
            raise ValueError(
                "the tokenizer's chat template marks nothing of it as said by the assistant; look at where the "
                "template has {% generation %}"
            )
        # By decoding, because a template may change the text of messages.
        yield Tokens(ids, mask, len(tokenizer.decode(ids[mask].tolist()).encode()))


def _read_preference(data: TextData, record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the prompt with each answer, as pairs of strings or as chats."""
    prompt = record.get(data.prompt_key)
    if isinstance(record["chosen"], str):
        prompt = _string(record, data.prompt_key)
        return (prompt, _string(record, "chosen")), (prompt, _string(record, "rejected"))
    sides = []
    for side in ("chosen", "rejected"):
        messages = record[side] if isinstance(record[side], list) else [record[side]]
        # Some data sets repeat the prompt in each answer.
        if prompt and isinstance(messages[0], Mapping) and messages[0].get("role") == "assistant":
            messages = [*([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt), *messages]
        sides.append(_read_chat(data, {data.messages_key: messages, TOOLS: record.get(TOOLS)}))
    return sides[0], sides[1]


def _encode_preferences(tokenizer: TextTokenizer, pairs: Sequence[tuple[Any, Any]]) -> Iterator[Tokens]:
    for pair in pairs:
        yield from (_encode_chats if isinstance(pair[0], Chat) else _encode_responses)(tokenizer, pair)


KINDS: dict[str, RecordKind] = {
    "chat": RecordKind(
        keys=lambda data, record: (_messages_key(data, record),),
        read=_read_chat,
        encode=_encode_chats,
        texts=lambda chat: [message.get("content", "") for message in chat.messages],
        packed=True,
    ),
    "response": RecordKind(
        keys=_pair,
        read=_read_response,
        encode=_encode_responses,
        texts=list,
        packed=True,
    ),
    "text": RecordKind(
        keys=lambda data, record: (_text_key(data, record),),
        read=lambda data, record: _string(record, _text_key(data, record)),
        encode=lambda tokenizer, texts: (
            Tokens(tokenizer.bounded(tokens.ids), None, tokens.size) for tokens in encode_text(tokenizer, texts)
        ),
        texts=lambda text: [text],
        packed=False,
    ),
    "preference": RecordKind(
        keys=lambda data, record: (
            *(() if isinstance(record.get("chosen"), list) else (data.prompt_key,)),
            "chosen",
            "rejected",
        ),
        read=_read_preference,
        encode=_encode_preferences,
        texts=lambda pair: [text for side in pair for text in side if isinstance(text, str)],
        packed=True,
        sequences=2,
    ),
}
"""A record is of the first kind whose keys it has."""
