"""``zeromesh chat``: messages from standard input, answers as they come, with all of the conversation as context."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeromesh.apps.evaluate.evaluated_model import EvaluatedModel, adapted_model
from zeromesh.apps.train.export_run import export_files
from zeromesh.apps.train.model import quiet
from zeromesh.apps.train.sample import TextWriter, load_writer, writer_of
from zeromesh.apps.train.screen import make_console, write
from zeromesh.base.files import write_text
from zeromesh.checkpoint.weights.export import ADAPTERS
from zeromesh.checkpoint.weights.pretrained import model_folder, require_transformers

HELP = (
    "/reset forgets the conversation, /save FILE writes it, /help lists these; Ctrl-C ends an answer, Ctrl-D the chat"
)


@dataclass
class Conversation:
    """Messages so far, and the model that continues them."""

    writer: TextWriter
    has_template: bool
    tokens: int  # of an answer, at most
    temperature: float
    seed: int
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""  # of a model without a chat template, which continues it

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all but the system's message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.text = self.system or ""

    def answer(self, message: str) -> Generator[str]:
        """Yield the answer to a message piece by piece; what was yielded is kept when the iterator is closed."""
        pieces: list[str] = []
        turn = len(self.messages)
        self.messages.append({"role": "user", "content": message})
        self.text += message
        try:
            for piece in self.writer.continued(self._before(), self.tokens, self.temperature, self.seed + turn):
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
            self.text += "".join(pieces)

    def _before(self) -> list[int]:
        """Return the ids that an answer follows; of a conversation that is too long, without its oldest turns."""
        if not self.has_template:
            return self.writer.beginning(self.text)
        tokenizer, longest = self.writer.tokenizer, self.writer.longest
        first = 0 if self.system is None else 1
        while True:
            ids: list[int] = tokenizer.prompt(self.messages).tolist()
            # The last message stays, and an answer needs room: a window that moves would cut the template.
            if longest is None or len(ids) + self.tokens <= longest or len(self.messages) <= first + 2:
                return ids
            del self.messages[first : first + 2]


def load(model: EvaluatedModel) -> TextWriter:
    """Load a model on one process, on the accelerator if there is one; raise ValueError if it has no tokenizer."""
    tokenizer = model.tokenizer
    if model.run is None:
        return writer_of(_load_folder(model_folder(str(model.path))), tokenizer)
    if model.tag is None and model.run.has_finished and not torch.accelerator.is_available():
        return load_writer(model.run)  # what the run wrote at its end
    assert model.checkpoint is not None
    with tempfile.TemporaryDirectory(prefix="zeromesh-") as name:
        export_files(model.path, Path(name) / "model", model.checkpoint, merge=False)
        return writer_of(_load_folder(Path(name) / "model"), tokenizer)


def _load_folder(folder: Path) -> Any:
    quiet()
    # The CPU computes 16 bits slowly, and they are exact in fp32.
    device = torch.accelerator.current_accelerator()
    dtype: torch.dtype | str = torch.float32 if device is None else "auto"
    if (folder / ADAPTERS[0]).is_file():
        model: Any = adapted_model(folder, dtype)
    else:
        transformers = require_transformers()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    return model.to(device or "cpu").eval()


def chat(model: EvaluatedModel, tokens: int, temperature: float, seed: int, system: str | None) -> None:
    """Talk with a model until the end of standard input; raise ValueError if there is none, or no tokenizer."""
    writer = load(model)
    conversation = Conversation(writer, _has_template(writer), tokens, temperature, seed, system)
    if conversation.has_template and system is not None:
        writer.tokenizer.prompt([*conversation.messages, {"role": "user", "content": "?"}])  # raises if it is refused
    console = make_console()
    console.print(f"{model.path} ({HELP})")
    if not conversation.has_template:
        console.print("the tokenizer has no chat template: what you write is continued as one text")
    while (line := _read()) is not None:
        command, _, rest = line.strip().partition(" ")
        if command == "/reset":
            conversation.reset()
            console.print("the conversation is forgotten")
        elif command == "/save":
            console.print(_save(conversation, rest.strip()))
        elif command.startswith("/"):
            console.print(HELP if command == "/help" else f"{command} is no command; {HELP}")
        elif line.strip():
            _show(conversation.answer(line))


def _has_template(writer: TextWriter) -> bool:
    try:
        writer.tokenizer.prompt([{"role": "user", "content": "?"}])
    except ValueError:
        return False
    return True


def _read() -> str | None:
    """Return a line of standard input; None at its end."""
    if sys.stdin is None:  # closed
        return None
    try:
        # input() has history and editing on a terminal, and writes its prompt there only.
        line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
    except EOFError:
        write("\n")
        return None
    except KeyboardInterrupt:  # a line that was not sent is given up, as in a shell
        write("\n")
        return ""
    if not sys.stdin.isatty():
        return line.rstrip("\n") if line else None
    # Bytes that the locale does not know are lone surrogates, which no tokenizer takes.
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _show(pieces: Generator[str]) -> None:
    try:
        for piece in pieces:
            write(piece)
        write("\n")
    except KeyboardInterrupt:
        write("\n(ended)\n")
    finally:
        pieces.close()


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        return "/save needs the name of a file, as in /save chat.txt"
    lines = [f"{message['role']}: {message['content']}" for message in conversation.messages]
    try:
        write_text(Path(name).expanduser(), "\n".join(lines) + "\n")
    except OSError as error:
        return f"{name!r} cannot be written: {error.strerror}"
    return f"{len(lines)} messages are in {name}"
