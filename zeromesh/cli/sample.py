"""``zeromesh sample``: continue a text with a trained model, one token after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from zeromesh.architectures.decoder import Decoder
from zeromesh.cli.folder import RunFolder
from zeromesh.cli.screen import make_console, write
from zeromesh.data.making import TOKENIZER_FOLDER
from zeromesh.data.tokenizer import TextTokenizer, load_tokenizer, stream_text


@dataclass(frozen=True)
class Writer:
    """A model on one process, with its tokenizer."""

    model: Decoder
    tokenizer: TextTokenizer

    def pieces(self, prompt: str, tokens: int, temperature: float, seed: int) -> Iterator[str]:
        """Continue ``prompt`` by up to ``tokens`` tokens, piece by piece; ends early at the end of a text.

        Args:
            prompt: the beginning; the model sees no more of it than fits into its sequence length.
            tokens: most tokens to add.
            temperature: divides the logits; 0 takes the likeliest token.
            seed: of the choices.
        """
        before = [self.tokenizer.end, *self.tokenizer.encode([prompt])[0].tolist()]
        yield from stream_text(self.tokenizer, self._ids(before, tokens, temperature, seed), before)

    @torch.no_grad()
    def _ids(self, before: list[int], tokens: int, temperature: float, seed: int) -> Iterator[int]:
        context = list(before)
        generator = torch.Generator().manual_seed(seed)
        longest = self.model.sizes.shape.sequence_length
        self.model.eval()
        for _ in range(tokens):
            logits = self.model(torch.tensor([context[-longest:]]))[0, -1, : self.tokenizer.size].float()
            token = _choose(logits, temperature, generator)
            if token == self.tokenizer.end:
                break
            context.append(token)
            yield token

    def text(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        """The prompt and its continuation."""
        return prompt + "".join(self.pieces(prompt, tokens, temperature, seed))


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))


def load_writer(folder: RunFolder) -> Writer:
    """The model at the end of a run, in fp32 on the CPU.

    Raises:
        ValueError: if there is no run in the folder, or it has not finished.
    """
    if not folder.config.is_file():
        raise ValueError(f"{str(folder.path)!r} holds no run; name the folder that run.output named in training")
    if not folder.model.is_file():
        raise ValueError(
            f"the run in {str(folder.path)!r} has no {folder.model.name}: it has not finished; "
            "continue it with zeromesh train CONFIG --resume"
        )
    tokenizer = folder.text / TOKENIZER_FOLDER
    if not tokenizer.is_dir():
        raise ValueError(
            f"the run in {str(folder.path)!r} has no tokenizer, since it was trained on tokens; train with the one "
            "that they were made with in data.tokenizer"
        )
    shape = folder.settings().model
    if shape is None:
        raise ValueError(f"{str(folder.config)!r} has no section 'model'; it was not written by zeromesh train")
    with torch.device("meta"):
        model = Decoder(shape)
    state = {name: tensor.float() for name, tensor in load_file(folder.model).items()}
    if model.sizes.tied:
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state, assign=True)
    return Writer(model, load_tokenizer(tokenizer))


def continue_text(run: Path, prompt: str, tokens: int, temperature: float, seed: int, count: int) -> None:
    """Write continuations to the terminal as they come.

    Raises:
        ValueError: if the run cannot be sampled from.
    """
    writer = load_writer(RunFolder(run))
    # Python keeps bytes of the command line that the locale does not know as lone surrogates.
    prompt = os.fsencode(prompt).decode("utf-8", "replace")
    console = make_console()
    for number in range(count):
        if number:
            console.rule()
        write(prompt)
        for piece in writer.pieces(prompt, tokens, temperature, seed + number):
            write(piece)
        write("\n")
