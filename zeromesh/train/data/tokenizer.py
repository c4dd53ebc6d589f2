"""Tokenizers behind one small interface: those of the ``tokenizers`` library, and folders of ``transformers``.

The tokenizer that is trained here is byte-level byte-pair encoding: Sennrich et al., "Neural Machine Translation of
Rare Words with Subword Units", 2016; on bytes, as in GPT-2.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zeromesh.train.data.chat import Ids, Message, Tools, render, render_prompt

END_OF_TEXT = "<|endoftext|>"

KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<|eot|>", "</s>", "<eos>")
"""Names of the token between two documents in known tokenizers."""

WEIGHTS = (".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors")
"""Ends of the names of files that are no part of a tokenizer, though they lie beside it."""

LONGEST_WORD = 1000
"""Characters of a word that a vocabulary is learned from; longer ones are cut."""

_WORDS = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")
_BLANKS = re.compile(rf"\s{{{LONGEST_WORD + 1}}}")
_log = logging.getLogger(__name__)

SMALLEST_VOCABULARY = 257
TOKENIZER_FILE = "tokenizer.json"
UNKNOWN = "�"
"""Character that decoding writes for bytes that are no character, or not yet."""


@dataclass(frozen=True)
class TextTokenizer:
    """Between text and ids. The names of special tokens in a text are text.

    Attributes:
        size: ids are below it.
        begin: the id that begins a document, if the tokenizer puts one before a text by itself; chats have what their
            template says.
        end: the id that ends a document.
        pad: the id that fills what is left of a sample; it is never a label.
        encode: texts to ids, int64, without special tokens added.
        decode: ids to text, without special tokens.
        chat: messages and tools to ids and to which of them the assistant has said, bool, of the same shape.
        prompt: messages to the ids after which the assistant speaks next.
        save: writes all that ``load_tokenizer`` needs into a folder.
    """

    size: int
    begin: int | None
    end: int
    pad: int
    encode: Callable[[Sequence[str]], list[Ids]]
    decode: Callable[[Sequence[int]], str]
    chat: Callable[[Sequence[Message], Tools], tuple[Ids, NDArray[np.bool_]]]
    prompt: Callable[[Sequence[Message]], Ids]
    save: Callable[[Path], None]

    def bounded(self, ids: Ids, first: bool = True, last: bool = True) -> Ids:
        """A document, or its first or last part, with what begins and ends it."""
        before = [self.begin] if first and self.begin is not None else []
        return np.concatenate([np.array(before, dtype=np.int64), ids, np.array([self.end] if last else [], np.int64)])


def load_tokenizer(path: Path) -> TextTokenizer:
    """Read a tokenizer from a file of ``tokenizers``, or from a folder of one of the two kinds. Nothing is downloaded.

    Raises:
        ValueError: if there is none, it cannot be read, or has no token for the end of a text.
    """
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        raise ValueError(
            f"tokenizer {str(path)!r} does not exist; name a JSON file of the tokenizers library, or a folder with the "
            "tokenizer of a model"
        )
    names = {file.name for file in path.iterdir()}
    return _of_file(path / TOKENIZER_FILE) if names == {TOKENIZER_FILE} else _of_folder(path)


def content_key(path: Path) -> str:
    """A hash of the tokenizer's files; of a folder, all that are not weights count."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        if file.suffix not in WEIGHTS:
            digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def train_tokenizer(texts: Iterable[str], size: int, fill: bool = True) -> TextTokenizer:
    """Learn a byte-level byte-pair vocabulary.

    Args:
        texts: what to learn from.
        size: entries of the vocabulary.
        fill: refuse texts that do not have enough pairs to fill it, instead of making a smaller one.

    Raises:
        ValueError: if ``size`` has no room for the bytes, or the texts do not fill it.
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
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    cuts = _Cuts(texts)
    tokenizer.train_from_iterator(cuts, trainer)
    cuts.warn()
    reached = tokenizer.get_vocab_size()
    if fill and reached < size:
        raise ValueError(
            f"data.vocabulary_size = {size} is too large: the training text only gives {reached} entries; "
            f"set it to {reached} or less, or add text"
        )
    return _wrapped(tokenizer, "the tokenizer")


class _Cuts:
    """Texts, of which words without end are cut: what learning takes grows with the square of their length.

    A word is a run of letters, of digits, of blanks, or of others, as the tokenizer divides texts. Only pairs across a
    cut are not counted; texts are encoded as they are.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self._count = self._longest = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            if max(map(len, text.split()), default=0) > LONGEST_WORD or _BLANKS.search(text):
                yield from self._parts(text)
            else:
                yield text

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        for word in _WORDS.finditer(text):
            length = word.end() - word.start()
            if length > LONGEST_WORD:
                self._count, self._longest = self._count + 1, max(self._longest, length)
                for cut in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
                    yield text[start:cut]
                    start = cut
        yield text[start:]

    def warn(self) -> None:
        """Say what was cut."""
        if self._count:
            _log.warning(
                "the training text has %d words of more than %s characters without a blank, the longest of %s: the "
                "vocabulary is learned from pieces of them; is it text, or are these data in a text file?",
                self._count, f"{LONGEST_WORD:,}", f"{self._longest:,}",
            )  # fmt: skip


def stream_text(tokenizer: TextTokenizer, ids: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
    """Text as its ids come, each piece as soon as no later id can change it.

    A character may take several ids, and some tokenizers write a word differently at the beginning of a text, so each
    piece is what decoding gains by the new ids beside those of the piece before.

    Args:
        tokenizer: that the ids belong to.
        ids: the new ones.
        before: ids that the text goes on from.
    """
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
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{str(path)!r} is not a tokenizer.json of the tokenizers library: {error}") from error
    return _wrapped(tokenizer, repr(str(path)))


def _wrapped(tokenizer: Tokenizer, name: str) -> TextTokenizer:
    tokenizer.encode_special_tokens = True
    end = next((found for end in KNOWN_ENDS if (found := tokenizer.token_to_id(end)) is not None), None)
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
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(
            f"the tokenizer in {str(folder)!r} needs the package transformers: pip install 'zeromesh[hf]'"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the many kinds of tokenizers raise
        raise ValueError(
            f"{str(folder)!r} holds no tokenizer that transformers can read without running code of its own: {error}"
        ) from error
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"the tokenizer in {str(folder)!r} has no eos_token; set one in its tokenizer_config.json")

    def encode(texts: Sequence[str]) -> list[Ids]:
        if not texts:
            return []
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        found = tokenizer(list(texts), return_attention_mask=False, **options)["input_ids"]
        return [np.array(ids, dtype=np.int64) for ids in found]

    def save(target: Path) -> None:
        tokenizer.save_pretrained(str(target))

    return TextTokenizer(
        size=max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1),
        begin=next((first for first in tokenizer("")["input_ids"][:1] if first == tokenizer.bos_token_id), None),
        end=end,
        pad=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        encode=encode,
        decode=lambda ids: str(
            tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ),
        chat=lambda messages, tools: render(tokenizer, messages, tools),
        prompt=lambda messages: render_prompt(tokenizer, messages),
        save=save,
    )
