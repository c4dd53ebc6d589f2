"""Rendezvous of several nodes over a store whose content is signed."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from zeromesh.base.files import read_text
from zeromesh.comm.trust import LEAST_SECRET, SECRET

RUN = "zeromesh"

HOW = (
    "make one with: python3 -c 'import secrets; print(secrets.token_hex())' > secret; chmod 600 secret; copy it to "
    "every node, and pass --secret-file secret there"
)


def read_secret(file: Path | None) -> bytes:
    """Return the secret of the nodes, of a file or of the variable ZEROMESH_SECRET; empty where there is none."""
    if file is None:
        secret, name = os.environ.get(SECRET, "").strip().encode(), SECRET
    else:
        try:
            secret, mode, name = (
                read_text(file, "latin-1").strip().encode("latin-1"),
                file.stat().st_mode,
                f"--secret-file {file}",
            )
        except OSError as error:
            raise ValueError(f"--secret-file {file} cannot be read ({error.strerror or error}); {HOW}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ValueError(
                f"--secret-file {file} has the mode {stat.S_IMODE(mode):o}, so that other users may read it, or write "
                f"to it: chmod 600 {file}"
            )
    if (secret or file is not None) and len(secret) < LEAST_SECRET:
        raise ValueError(f"{name} has {len(secret)} bytes, but must have at least {LEAST_SECRET}; {HOW}")
    return secret


class SignedBackend(C10dRendezvousBackend):
    """torch's backend for the state of a rendezvous, which is signed: HMAC-SHA256 with a secret of the nodes."""

    # The state is pickled, in a store that takes connections from everybody; nothing is unpickled whose signature is
    # wrong.

    def __init__(self, store: Any, secret: bytes) -> None:
        self._secret = secret
        super().__init__(store, RUN)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write a state; return the present one, its token, and whether it is the one that was written."""
        stored = super().set_state(self._sign(state) + state, token)
        return None if stored is None else (stored[0], stored[1], stored[0] == state)

    def _sign(self, state: bytes) -> bytes:
        return hmac.new(self._secret, RUN.encode() + state, hashlib.sha256).digest()

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        stored = super()._decode_state(base64_state)
        if stored is None:
            return None
        size = hashlib.sha256().digest_size
        signature, state = stored[0][:size], stored[0][size:]
        if not hmac.compare_digest(signature, self._sign(state)):
            raise RendezvousStateError("the state of the rendezvous is not signed with this node's secret")
        return state, stored[1]


def signed_rendezvous(parameters: RendezvousParameters, secret: bytes) -> RendezvousHandler:
    """Make the rendezvous of several nodes."""
    _, store = create_backend(parameters)
    return create_handler(store, SignedBackend(store, secret), parameters)
