"""Updates of the host that run beside the next forward and backward: their parameters come one update late.

Where the host is slower than a backward, the device would wait for it at every boundary. With a delay it does not: at a
boundary the new parameters of the update before are sent, and the update by the gradients of this one begins. So each
gradient is one of parameters that lack an update, which is **not** what the optimizer is meant to compute; and what is
changed meanwhile changes what is being updated. All else is exact: it is the same update, of the same gradients, in the
same order.

The masters and states that an update changes are looked at by nobody until it has ended: ``Flat.bring``, which every
one calls who looks at them, waits for it.

Source: Ren et al., "ZeRO-Offload", 2021 (section 5.2, one-step delayed parameter update).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from functools import partial

import torch

from zeromesh.model.placement import Tier
from zeromesh.observe.spans import unseen
from zeromesh.shard.unit import Bring, Flat
from zeromesh.tiers.link import DONE, Copy, Link
from zeromesh.tiers.memory import zeros_on

_log = logging.getLogger(__name__)

Compute = Callable[[Flat, torch.Tensor, Sequence[bool], torch.Tensor], None]
"""Updates a flat buffer whose master is in memory: from the home of its gradient, with which parameters have one, into
the home's dtype as well."""

Present = Callable[[Sequence[Flat]], Generator[Flat]]
"""Each of some flat buffers, while its master and states are in memory."""


class Delayed:
    """Keeps what such updates are made of, and what they result in.

    Args:
        flats: that are updated so.
        device: that computes.
        link: to it.
        pinned: whether host memory is page-locked.

    Attributes:
        flats: these.
        begun: whether an update was begun that has not been published.
    """

    def __init__(self, flats: Collection[Flat], device: torch.device, link: Link, pinned: bool) -> None:
        self.flats = frozenset(flats)
        self.begun = False
        self._link = link
        self._outputs: dict[Flat, torch.Tensor] = {}
        for flat in flats:
            elements = flat.own.stop - flat.own.start
            self._outputs[flat] = zeros_on(Tier.HOST, elements, flat.layout.dtype, device, pinned)
        self._sent: dict[Flat, Copy] = {}
        self._spare: dict[Flat, torch.Tensor | None] = {}
        self._updated: set[Flat] = set()
        self._warned = False
        self._changed: set[Flat] = set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._bring: dict[Flat, Bring] = {flat: flat.bring for flat in flats}
        for flat in flats:
            flat.bring = partial(self._settled, flat)

    @property
    def nbytes(self) -> int:
        """Of the new parameters, in host memory."""
        return sum(output.nbytes for output in self._outputs.values())

    def begin(self, order: Sequence[Flat], present: Present, compute: Compute) -> None:
        """Begin to update these, those that have a gradient; the homes of gradients are others from here on."""
        assert not self.begun, "an update begins before the last one was published"
        self.begun = True
        taken: dict[Flat, tuple[torch.Tensor, list[bool]]] = {}
        for flat in order:
            gradient = flat.gradient
            if flat not in self.flats or gradient is None or not any(gradient.used):
                continue
            assert gradient.home is not None
            taken[flat] = gradient.home, list(gradient.used)
            spare = self._spare.get(flat)
            same = spare is not None and spare.dtype is gradient.home.dtype  # not so where sums were found too narrow
            gradient.buffer, self._spare[flat] = spare if same else None, gradient.home

        @torch.no_grad()
        def work() -> None:
            try:
                with unseen(), closing(present(list(taken))) as flats:
                    for flat in flats:
                        self._sent.get(flat, DONE).wait()
                        compute(flat, *taken[flat], self._outputs[flat])
                        self._updated.add(flat)
            except BaseException as error:  # it is raised where the update is asked for
                self._error = error

        self._thread = threading.Thread(target=work, name="delayed update", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the update that was begun has ended.

        Raises:
            OSError: the disk failed, now or earlier: what there is then is neither of before an update nor of after it.
        """
        self.stop()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """As ``wait``, whatever became of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def publish(self, flat: Flat) -> None:
        """Send one flat buffer's new parameters home, if there are any."""
        if flat in self._changed:
            self._bring[flat]()
            flat.bring_home(write=True, read=False)
            flat.home.copy_(flat.master)
        elif flat in self._updated:
            self._sent[flat] = flat.send_home(self._outputs[flat], self._link)

    def published(self) -> None:
        """All parameters are those of their masters."""
        self.begun = False
        self._updated, self._changed = set(), set()

    def _settled(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """What somebody writes to a master counts, and not what was computed of it before."""
        self.wait()
        if write:
            if self.begun and flat in self._updated and not self._warned:
                self._warned = True
                _log.warning(
                    "parameters of %s were written to while an update of them was under way, which is late "
                    "(inexact_delay_after): what was written takes the place of the update, also where it is as "
                    "before. Parameters that are changed in every step, as by max_norm or clamp_, hardly train so",
                    flat.gradient.unit if flat.gradient else "a unit",
                )
            self._changed.add(flat)
        self._bring[flat](write, read)


def delayed_bytes(flat: Flat) -> int:
    """In host memory for a flat buffer whose update is delayed, of its parameters; its gradient is there twice."""
    return (flat.own.stop - flat.own.start) * flat.layout.dtype.itemsize
