"""States of a process's random number generators."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import sys
from typing import Any

import torch
from torch import nn

from zeromesh.base.keras_layers import global_seed, layers_of, seeds_of
from zeromesh.comm.agreement import texts
from zeromesh.comm.collectives import Group

_log = logging.getLogger("zeromesh")


def random_state(model: nn.Module | None = None) -> torch.Tensor:
    """Return the states of Python's, numpy's (if it is in use) and torch's generators as bytes.

    Those of seed generators in the model's Keras layers are among them.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state().tolist()}
    if "numpy" in sys.modules:
        import numpy

        kind, key, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = [kind, [int(word) for word in key], position, has_gauss, cached]
    if torch.accelerator.is_available() and torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    if model is not None and next(layers_of(model), None) is not None:
        shared = global_seed(make=False)
        states["keras"] = {"layers": [state.value.tolist() for state in seeds_of(model)]}
        states["keras"]["global"] = None if shared is None else shared.value.tolist()
    return torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)


def restore_random_state(packed: torch.Tensor, model: nn.Module | None = None) -> None:
    """Restore the generators to the states that ``random_state`` returned for the same model."""
    states = json.loads(bytes(packed.tolist()))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if "numpy" in states:
        import numpy

        kind, key, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(key, dtype=numpy.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
    if model is not None and "keras" in states:
        _restore_seeds(model, states["keras"])


def require_random_state(packed: torch.Tensor, model: nn.Module | None = None) -> None:
    """Raise what ``restore_random_state`` or ``derive_random_state`` would raise; the generators stay as they are."""
    before = random_state(model)
    try:
        restore_random_state(packed, model)
    finally:
        restore_random_state(before, model)


def _restore_seeds(model: nn.Module, saved: dict[str, Any]) -> None:
    seeds, values = seeds_of(model), saved["layers"]
    if len(seeds) != len(values):
        _log.warning(
            "the checkpoint has states of %d seed generators, and the model has %d: its layers go on with their own",
            len(values),
            len(seeds),
        )
        return
    if saved["global"] is not None:
        seeds, values = [*seeds, global_seed(make=True)], [*values, saved["global"]]
    for state, value in zip(seeds, values, strict=True):
        state.assign(torch.tensor(value).to(state.value))


def share_random_state(group: Group) -> None:
    """Give all ranks of a group the random state of its first rank. Collective."""
    if group.size > 1:
        state = bytes(random_state().tolist()).decode()
        restore_random_state(torch.tensor(list(texts(group, state)[0].encode()), dtype=torch.uint8))


def derive_random_state(packed: torch.Tensor, rank: int, model: nn.Module | None = None) -> None:
    """Seed the generators with a number made of another rank's state and this rank's number."""
    states = json.loads(bytes(packed.tolist()))
    # Hashed, so that ranks with neighbouring numbers draw nothing alike.
    digest = hashlib.sha256(bytes(packed.tolist()) + f"rank {rank}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(seed)
    if model is not None and "keras" in states:
        layers = [[random.randrange(1, 10**9), 0] for _ in states["keras"]["layers"]]
        _restore_seeds(model, {"layers": layers, "global": [random.randrange(1, 10**9), 0]})
