"""Recognise notes in sound: a small Whisper, which writes the notes of a melody that it hears.

    zeromesh launch --nproc 2 examples/speech/train.py

Melodies of sine tones in noise are made as they are needed. ``--plain`` trains with DistributedDataParallel instead, in
the same loop.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import WhisperConfig, WhisperForConditionalGeneration

import zeromesh

CONFIG = json.loads(Path(__file__).with_name("config.json").read_text())
BATCH = CONFIG["train_batch_size"]  # over all ranks
NOTES, LENGTH = 8, 5  # different notes, and notes of a melody
START, END = 8, 9  # tokens, beside one for each note
RATE, WINDOW, HOP, FRAMES = 4000, 128, 64, 48  # samples per second; samples; samples; frames of a melody
BINS = 32  # frequencies of a frame, up to 1,000 Hz


def make_batch(count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return spectrograms (count, BINS, FRAMES) of melodies, and their notes (count, LENGTH)."""
    notes = torch.randint(NOTES, (count, LENGTH), generator=random)
    samples = HOP * (FRAMES - 1)
    # Each note lasts between a half and one and a half of its share.
    shares = 0.5 + torch.rand(count, LENGTH, generator=random, dtype=torch.float64)
    ends = (shares.cumsum(1) / shares.sum(1, keepdim=True) * samples)[:, :-1]
    playing = torch.searchsorted(ends.contiguous(), torch.arange(samples).double().repeat(count, 1))
    pitch = 220 * 2 ** (2 * notes / 12)  # whole tones upwards from A
    sound = (2 * torch.pi * pitch.gather(1, playing).cumsum(1) / RATE).sin()
    sound = sound + 0.3 * torch.randn(sound.shape, generator=random)
    window = torch.hann_window(WINDOW, dtype=sound.dtype)
    spectrum = torch.stft(sound, WINDOW, HOP, window=window, return_complex=True).abs()[:, :BINS]
    return (spectrum + 0.1).log().to(torch.get_default_dtype()), notes


def make_model(width: int, layers: int) -> WhisperForConditionalGeneration:
    """Return a Whisper with random weights for these spectrograms and notes."""
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder")
             for name, value in {"layers": layers, "attention_heads": 4, "ffn_dim": 4 * width}.items()}  # fmt: skip
    ids = {"decoder_start_token_id": START, "bos_token_id": START, "eos_token_id": END, "pad_token_id": END}
    shape = WhisperConfig(
        vocab_size=10, num_mel_bins=BINS, d_model=width, max_source_positions=FRAMES // 2,
        max_target_positions=LENGTH + 2, suppress_tokens=None, begin_suppress_tokens=None, **sizes, **ids,
    )  # fmt: skip
    return WhisperForConditionalGeneration(shape)


@torch.no_grad()
def error_rate(model: Any, sounds: torch.Tensor, notes: torch.Tensor) -> float:
    """Return the share of notes, in per cent, that are written wrongly, one after the other."""
    model.eval()
    written = torch.full((len(sounds), 1), START, device=sounds.device)
    for _ in range(LENGTH):
        logits = model(input_features=sounds, decoder_input_ids=written).logits[:, -1]
        written = torch.cat([written, logits.argmax(1, keepdim=True)], 1)
    model.train()
    return 100 * float((written[:, 1:] != notes).double().mean())


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the loss and the seconds of each step, and the errors in new melodies."""
    zeromesh.init_distributed()  # one process or many, under any launcher
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    torch.manual_seed(options.seed)  # the same weights on all ranks
    model: Any = make_model(options.width, options.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 20, 1 - n / options.steps))
    if options.plain:
        model = DistributedDataParallel(model)
    else:
        model, optimizer, _, schedule = zeromesh.initialize(model, optimizer, lr_scheduler=schedule, config=CONFIG)

    random = torch.Generator().manual_seed(options.seed + 1)  # all ranks make the same batch, and take their share
    losses, seconds = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        sounds, notes = (part.chunk(ranks)[rank].to(device) for part in make_batch(BATCH, random))
        loss = model(input_features=sounds, labels=notes).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    test = make_batch(options.test, torch.Generator().manual_seed(0))
    errors = error_rate(model, *(part.to(device) for part in test))
    return {"loss": losses, "seconds": seconds, "wrong notes, %": errors}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"width": 64, "layers": 2, "steps": 300, "test": 256, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead of ZeroMesh")
    return parser.parse_args(words)


if __name__ == "__main__":
    result = train(parse())
    if dist.get_rank() == 0:
        print(f"{result['wrong notes, %']:.1f} % of the notes are wrong")
    dist.destroy_process_group()
