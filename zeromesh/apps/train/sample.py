"""``zeromesh sample``: continue a text with a trained model, token by token."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.data.tokenizer import TextTokenizer, load_tokenizer, stream_text
from zeromesh.apps.train.model import BuiltIn, Transformer, language_model, quantization_config, quiet
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.screen import make_console, write
from zeromesh.base.lengths import positions

Next = Callable[[Sequence[int]], torch.Tensor]
"""Function from all ids so far, a longer list in each call, to the logits of the next id, shape ``(vocabulary,)``."""


@dataclass(frozen=True)
class TextWriter:
    """A model on one process, with its tokenizer."""

    begin: Callable[[], Next]  # makes the function for a new text
    ends: frozenset[int]  # ids that end a text
    tokenizer: TextTokenizer
    longest: int | None = None  # tokens that the model looks at; None without a limit

    def pieces(self, prompt: str, tokens: int, temperature: float, seed: int, chat: bool = False) -> Iterator[str]:
        """Yield a continuation of ``prompt``, or with ``chat`` an answer to it, piece by piece."""
        if chat:
            before = self.tokenizer.prompt([{"role": "user", "content": prompt}]).tolist()
        else:
            before = self.beginning(prompt)
        yield from self.continued(before, tokens, temperature, seed)

    def beginning(self, text: str) -> list[int]:
        """Return the ids of the beginning of a document."""
        # A tokenizer without a token that begins a text was trained with the end of the text before.
        start = self.tokenizer.end if self.tokenizer.begin is None else self.tokenizer.begin
        return [start, *self.tokenizer.encode([text])[0].tolist()]

    def continued(self, before: list[int], tokens: int, temperature: float, seed: int) -> Iterator[str]:
        """Yield a continuation of ids piece by piece."""
        yield from stream_text(self.tokenizer, self._ids(before, tokens, temperature, seed), before)

    @torch.no_grad()
    def _ids(self, before: list[int], tokens: int, temperature: float, seed: int) -> Iterator[int]:
        context = list(before)
        # Drawn here and not by generate() of transformers: decoders of ours have no such method, and texts of a seed
        # should not depend on its version.
        generator = torch.Generator().manual_seed(seed)
        following = self.begin()
        for _ in range(tokens):
            # Models may have more entries than the tokenizer, which have no text.
            logits = following(context)[: self.tokenizer.size].float().cpu()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
            if token in self.ends:
                break
            context.append(token)
            yield token

    def text(self, prompt: str, tokens: int, temperature: float, seed: int, chat: bool = False) -> str:
        """Return the prompt with its continuation."""
        return prompt + ("\n" if chat else "") + "".join(self.pieces(prompt, tokens, temperature, seed, chat))


def load_writer(folder: RunFolder) -> TextWriter:
    """Load the model of a finished run, in fp32 on the CPU; raise ValueError if there is none, or no tokenizer."""
    if not folder.config.is_file():
        raise ValueError(f"{str(folder.path)!r} holds no run; name the folder that run.output named in training")
    if not folder.has_finished:
        if not folder.metrics.is_file():
            raise ValueError(
                f"{str(folder.path)!r} holds a model, and no run; talk with it by zeromesh chat {folder.path}"
            )
        raise ValueError(
            f"the run in {str(folder.path)!r} has no weights in {folder.model.name}: it has not finished; "
            "continue it with zeromesh train CONFIG --resume"
        )
    if not folder.tokenizer.is_dir():
        raise ValueError(
            f"the run in {str(folder.path)!r} has no tokenizer, since it was trained on tokens; train with the one "
            "that they were made with in data.tokenizer"
        )
    tokenizer = load_tokenizer(folder.tokenizer)
    language = language_model(folder.settings())
    if isinstance(language, Transformer):
        if language.lora is not None:
            folder.require_base()
        return writer_of(load_transformer(language, folder.model), tokenizer)
    assert isinstance(language, BuiltIn)
    decoder, longest = _decoder(language, folder.model / "model.safetensors"), language.sequence_length

    def following(ids: Sequence[int]) -> torch.Tensor:
        # The end that fits: the model has learned no positions beyond its sequence length.
        logits: torch.Tensor = decoder(torch.tensor([ids[-longest:]]))[0, -1]
        return logits

    return TextWriter(lambda: following, frozenset({tokenizer.end}), tokenizer, longest)


def writer_of(model: Any, tokenizer: TextTokenizer) -> TextWriter:
    """Return a writer with a model of transformers, on the model's device."""
    ends = model.generation_config.eos_token_id
    end_ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    longest = positions(model.config.get_text_config())
    return TextWriter(lambda: _cached(model, longest), end_ids | {tokenizer.end}, tokenizer, longest)


def _decoder(language: BuiltIn, weights: Path) -> Decoder:
    with torch.device("meta"):
        model = Decoder(language.shape)
    # The CPU computes bf16 slowly, and the weights are exact in fp32.
    state = {name: tensor.float() for name, tensor in load_file(weights).items()}
    if model.sizes.tied:  # a file of safetensors has shared memory once
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state, assign=True)
    return model.eval()


def load_transformer(language: Transformer, folder: Path) -> Any:
    """Load the model of transformers that a run wrote, in fp32, with its adapters if it trained some."""
    from transformers import AutoModelForCausalLM

    quiet()
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    if language.lora is None:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options).eval()  # type: ignore[no-untyped-call]
    from peft import PeftModel

    if language.source.quantization is not None:
        options["quantization_config"] = quantization_config(language.source.quantization, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(language.folder, trust_remote_code=False, **options)
    return PeftModel.from_pretrained(base, str(folder)).eval()


def _cached(model: Any, longest: int | None) -> Next:
    """Return a function for the next logits that keeps keys and values, if the model does."""
    cache, seen = None, 0

    def following(ids: Sequence[int]) -> torch.Tensor:
        nonlocal cache, seen
        # Beyond the last position the window moves, every position changes, and kept keys are wrong.
        if longest is not None and len(ids) > longest:
            ids, cache, seen = ids[-longest:], None, 0
        output = model(input_ids=torch.tensor([ids[seen:]], device=model.device), past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        seen = len(ids) if cache is not None else 0
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    return following


def continue_text(
    run: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    count: int,
    chat: bool,
    as_json: bool = False,
) -> None:
    """Print ``count`` continuations as they come, or all as JSON; raise ValueError if the run has no model."""
    writer = load_writer(RunFolder(run))
    # Python decodes bytes of the command line that the locale does not know to lone surrogates.
    prompt = os.fsencode(prompt).decode("utf-8", "replace")
    if as_json:
        seeds = range(seed, seed + count)
        texts = ["".join(writer.pieces(prompt, tokens, temperature, each, chat)) for each in seeds]
        write(json.dumps({"prompt": prompt, "continuations": texts}, indent=1) + "\n")
        return
    console = make_console()
    for number in range(count):
        if number:
            console.rule()
        write(prompt + ("\n" if chat else ""))
        for piece in writer.pieces(prompt, tokens, temperature, seed + number, chat):
            write(piece)
        write("\n")
