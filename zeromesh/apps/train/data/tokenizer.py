"""Tokenizers behind one interface: files of the ``tokenizers`` library, and folders of ``transformers``."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zeromesh.base.files import LARGEST_RECORD, open_regular, require_regular
from zeromesh.base.requirements import imported

Ids = NDArray[np.int64]
Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None  # schemas of the functions that the assistant may call

STATEMENTS = re.compile(r"{%[-+]?\s*(\w+)")  # finds the first words of the statements in a chat template

END_OF_TEXT = "<|endoftext|>"

# Names that known tokenizers give the token between two documents.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<|eot|>", "</s>", "<eos>")

# Files beside a tokenizer that are not part of it, and too large to hash at each start.
WEIGHTS = (".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors")

LONGEST_WORD = 1000  # characters of a word that a vocabulary is learned from; longer ones are cut

_WORDS = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")
_BLANKS = re.compile(rf"\s{{{LONGEST_WORD + 1}}}")
_log = logging.getLogger(__name__)

SMALLEST_VOCABULARY = 257
TOKENIZER_FILE = "tokenizer.json"
UNKNOWN = "�"  # written by decoding for bytes that are not a whole character


@dataclass(frozen=True)
class TextTokenizer:
    """Conversion between text and ids. Names of special tokens inside a text are plain text."""

    size: int  # upper bound of the ids
    begin: int | None  # id that begins a document, unless it is a chat; None if the tokenizer puts none before a text
    end: int  # id that ends a document
    pad: int  # id that fills samples up; it is never a label
    encode: Callable[[Sequence[str]], list[Ids]]  # without special tokens, as is decode
    decode: Callable[[Sequence[int]], str]
    chat: Callable[[Sequence[Message], Tools], tuple[Ids, NDArray[np.bool_]]]  # ids, and a mask of the assistant's
    prompt: Callable[[Sequence[Message]], Ids]  # ids after which the assistant speaks
    save: Callable[[Path], None]  # writes all files that load_tokenizer needs into a folder

    def bounded(self, ids: Ids, first: bool = True, last: bool = True) -> Ids:
        """Return a document, or its first or last piece, with its begin and end tokens."""
        before = [self.begin] if first and self.begin is not None else []
        return np.concatenate([np.array(before, dtype=np.int64), ids, np.array([self.end] if last else [], np.int64)])


def load_tokenizer(path: Path) -> TextTokenizer:
    """Read a tokenizer from a file of ``tokenizers``, or from a folder of either kind. Nothing is downloaded."""
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        raise ValueError(
            f"tokenizer {str(path)!r} does not exist; name a JSON file of the tokenizers library, or a folder with the "
            f"tokenizer of a model (python examples/tiny_model.py {path} makes one to try)"
        )
    # A lone tokenizer.json, as a run without a model of transformers saves it, needs no transformers.
    names = {file.name for file in path.iterdir()}
    return _of_file(path / TOKENIZER_FILE) if names == {TOKENIZER_FILE} else _of_folder(path)


def content_key(path: Path) -> str:
    """Return a hash of the files of a tokenizer; in a folder, those that are not weights."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        if file.suffix not in WEIGHTS:
            require_regular(file, LARGEST_RECORD)
            with open_regular(file) as content:
                digest.update(f"{file.name}\0".encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def train_tokenizer(texts: Iterable[str], size: int, fill: bool = True) -> TextTokenizer:
    """Learn a byte-level byte-pair vocabulary of ``size`` entries (Sennrich et al., 2016; on bytes, as in GPT-2).

    With ``fill``, texts with too few pairs for this size are refused.
    """
    if size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"data.vocabulary_size = {size} is too small: the 256 bytes and the end of a text need "
            f"{SMALLEST_VOCABULARY} entries"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes, so that no text is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(_cut_words(texts), trainer)
    reached = tokenizer.get_vocab_size()
    if fill and reached < size:
        raise ValueError(
            f"data.vocabulary_size = {size} is too large: the training text only gives {reached} entries; "
            f"set it to {reached} or less, or add text"
        )
    return _wrapped(tokenizer, "the tokenizer")


def _cut_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, cut inside very long words."""
    # Learning takes time that grows with the square of their length. A word is a run of letters, of digits, of blanks,
    # or of others, as the tokenizer divides texts; the only effect is that pairs across a cut are not counted.
    count = longest = 0
    for text in texts:
        start = 0
        if max(map(len, text.split()), default=0) > LONGEST_WORD or _BLANKS.search(text):
            for word in _WORDS.finditer(text):
                length = word.end() - word.start()
                if length > LONGEST_WORD:
                    count, longest = count + 1, max(longest, length)
                    for cut in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
                        yield text[start:cut]
                        start = cut
        yield text[start:]
    if count:
        _log.warning(
            "the training text has %d words of more than %s characters without a blank, the longest of %s: the "
            "vocabulary is learned from pieces of them; is it text, or are these data in a text file?",
            count,
            f"{LONGEST_WORD:,}",
            f"{longest:,}",
        )


def stream_text(tokenizer: TextTokenizer, ids: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of ids that continue ``before``, each piece as soon as later ids cannot change it."""
    # A character may take several ids, and some tokenizers write a word differently at the start of a text. So a piece
    # is the difference between two decoded texts: the ids of the piece before, with and without the new ids.
    context, new = list(before), list[int]()
    for token in ids:
        new.append(token)
        text = tokenizer.decode(context + new)
        if not text.endswith(UNKNOWN):
            yield text[len(tokenizer.decode(context)) :]
            context, new = new, []
    if new:
        yield tokenizer.decode(context + new)[len(tokenizer.decode(context)) :]


def _of_file(path: Path) -> TextTokenizer:
    require_regular(path, LARGEST_RECORD)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{str(path)!r} is not a tokenizer.json of the tokenizers library: {error}") from error
    return _wrapped(tokenizer, repr(str(path)))


def _wrapped(tokenizer: Tokenizer, name: str) -> TextTokenizer:
    # A text that names a special token must not end the document.
    tokenizer.encode_special_tokens = True
    end = next((token_id for end in KNOWN_ENDS if (token_id := tokenizer.token_to_id(end)) is not None), None)
    if end is None:
        raise ValueError(f"{name} has no token for the end of a text; it needs one of {', '.join(KNOWN_ENDS)}")

    def encode(texts: Sequence[str]) -> list[Ids]:
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encoded]

    def chat(messages: Sequence[Message], tools: Tools = None) -> NoReturn:
        raise ValueError(
            f"chats need a chat template, which {name} does not have; set data.tokenizer to the folder of a model's "
            "tokenizer"
        )

    return TextTokenizer(
        size=max(tokenizer.get_vocab().values()) + 1,  # a vocabulary may have gaps
        begin=next((first for first in tokenizer.encode("").ids[:1] if first != end), None),
        end=end,
        pad=end,
        encode=encode,
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        chat=chat,
        prompt=chat,
        save=lambda folder: tokenizer.save(str(folder / TOKENIZER_FILE)),
    )


def _of_folder(folder: Path) -> TextTokenizer:
    transformers = imported("transformers", f"the tokenizer in {str(folder)!r} needs the package transformers")
    for file in folder.iterdir():
        if file.is_file() and file.suffix not in WEIGHTS:
            require_regular(file, LARGEST_RECORD)
    try:
        # No code of the folder is run: a tokenizer may come from anywhere.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # kinds of tokenizers differ in what they raise
        raise ValueError(
            f"{str(folder)!r} holds no tokenizer that transformers can read without running code of its own: {error}"
        ) from error
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"the tokenizer in {str(folder)!r} has no eos_token; set one in its tokenizer_config.json")

    def encode(texts: Sequence[str]) -> list[Ids]:
        if not texts:
            return []  # transformers takes an empty list for an error
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        encodings = tokenizer(list(texts), return_attention_mask=False, **options)["input_ids"]
        return [np.array(ids, dtype=np.int64) for ids in encodings]

    def prompt(messages: Sequence[Message]) -> Ids:
        with template_errors("the messages"):
            return _render_ids(tokenizer, messages, True)

    def save(target: Path) -> None:
        tokenizer.save_pretrained(str(target))

    return TextTokenizer(
        size=max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1),
        begin=next((first for first in tokenizer("")["input_ids"][:1] if first == tokenizer.bos_token_id), None),
        end=end,
        # Padding is never a label, so any id will do.
        pad=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        encode=encode,
        decode=lambda ids: str(
            tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ),
        chat=lambda messages, tools: _render(tokenizer, messages, tools),
        prompt=prompt,
        save=save,
    )


@contextmanager
def template_errors(refused: str) -> Iterator[None]:
    """Raise errors of a chat template, which may be of any type, as ValueError that says what it refuses."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the tokenizer's chat template refuses {refused}: {error}") from error


def _render(tokenizer: Any, messages: Sequence[Message], tools: Tools = None) -> tuple[Ids, NDArray[np.bool_]]:
    """Return the ids of a chat, and the mask of those that the assistant says, bool, of the same shape."""
    _require_template(tokenizer)
    template = tokenizer.get_chat_template(tools=tools)
    calls = any(message.get("tool_calls") for message in messages)
    for key, value in (("tools", tools), ("tool_calls", calls)):
        if value and key not in template:
            # Else the template leaves them out without a word.
            raise ValueError(
                f"has {key}, which the tokenizer's chat template does not write, so they would be missing from what is "
                "learned; take them out, or name a tokenizer whose template writes them"
            )
    # transformers warns and returns an empty mask for a template without marks, so the template is searched for them.
    if "generation" in STATEMENTS.findall(template):
        _require_text(tokenizer, messages, tools)
        rendered = tokenizer.apply_chat_template(
            list(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        return np.array(rendered["input_ids"], dtype=np.int64), np.array(rendered["assistant_masks"], dtype=bool)
    # Without marks, the assistant says what each of its turns adds to the chat before it. This holds only if the chat
    # up to there is a beginning of the whole one, which a template may well break, so it is compared.
    chat_ids = _render_ids(tokenizer, messages, False, tools)
    mask = np.zeros(len(chat_ids), dtype=bool)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            # The prompt of a turn, such as the name of the speaker, is not said by the assistant.
            before = _render_ids(tokenizer, messages[:place], True, tools) if place else np.empty(0, dtype=np.int64)
            after = _render_ids(tokenizer, messages[: place + 1], False, tools)
            if not (place and _begins(after, before) and _begins(chat_ids, after)):
                raise ValueError(
                    f"messages[{place}]: where the assistant's turn is cannot be found with the tokenizer's chat "
                    "template, since a chat up to there is not a beginning of the whole one; mark what the assistant "
                    "says in the template with {% generation %} and {% endgeneration %}"
                )
            mask[len(before) : len(after)] = True
    return chat_ids, mask


def _require_template(tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; name one that has, or put chat_template.jinja beside it")


def _render_ids(tokenizer: Any, messages: Sequence[Message], prompt: bool, tools: Tools = None) -> Ids:
    """Return the ids of a chat; with ``prompt``, up to the next turn of the assistant."""
    _require_template(tokenizer)
    rendered = tokenizer.apply_chat_template(
        list(messages), tools=tools, add_generation_prompt=prompt, return_dict=True, sanitize_control_tokens=True
    )
    return np.array(rendered["input_ids"], dtype=np.int64)


def _begins(ids: Ids, part: Ids) -> bool:
    return len(part) <= len(ids) and bool((ids[: len(part)] == part).all())


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
