"""Proof that a process is a rank of this run: a token that strangers do not have, and values signed with it.

Everybody on a machine can connect to its loopback interface, and everybody in a network to the ports of its hosts: the
ranks' store and their connections prove nothing by being reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zeromesh.comm.detect import Environment
from zeromesh.comm.failure import StartError
from zeromesh.comm.launchers import MPI, common_ancestor, names_of, value
from zeromesh.comm.messages import backends, gather_json

TOKEN = "ZEROMESH_TOKEN"
"""Variable with the token of one start of the ranks; ``zeromesh launch`` sets it."""
LASTING = "ZEROMESH_RUN_KEY"
"""Variable with a key of all starts of the ranks that one ``zeromesh launch`` makes, for what is left to the next."""
SECRET = "ZEROMESH_SECRET"
"""Variable with a secret that all nodes share."""
LEAST_SECRET = 16
"""Bytes of the shortest secret."""

_SIZE = hashlib.sha256().digest_size

_stores: WeakKeyDictionary[Any, SealedStore] = WeakKeyDictionary()  # by the process group of all ranks
_alive: list[SealedStore] = []  # torch keeps the part of a clone in C++ alive, and calls back into that in Python


def sign(key: bytes, *parts: str | bytes | memoryview) -> bytes:
    """Return the HMAC-SHA256 of some parts, which can be told apart."""
    code = hmac.new(key, digestmod="sha256")
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        code.update(len(data).to_bytes(8, "big"))
        code.update(data)
    return code.digest()


def run_name(environment: Environment) -> str:
    """Return what tells the run of this process from others, as far as its launcher says it; no secret."""
    row = names_of(environment.launcher)
    job, step = value(os.environ, row.job), value(os.environ, row.step)
    name = f"a run of {environment.world_size} ranks"
    if job is not None:
        return f"{name}, job {job}.{step or 0}"
    agent = os.environ.get("TORCHELASTIC_RUN_ID")
    if agent not in (None, "none", "zeromesh"):
        name += f", run id {agent}"
    # Nothing else tells apart two runs that torchrun or mpiexec started with the same options.
    if environment.one_node and (agent is not None or environment.launcher in MPI):
        name += f", started by process {common_ancestor(row)}"
    return name


def run_token(environment: Environment) -> bytes:
    """Return what the ranks of this run have and strangers have not; empty on several nodes without a secret."""
    token, secret = os.environ.get(TOKEN, "").encode(), os.environ.get(SECRET, "").strip().encode()
    if token:
        return token
    if secret:
        if len(secret) < LEAST_SECRET:
            raise ValueError(
                f"{SECRET} has {len(secret)} bytes, but must have at least {LEAST_SECRET}; use a longer one"
            )
        return sign(secret, "ranks")
    return _key_of_user() if environment.one_node and hasattr(os, "geteuid") else b""


def _key_of_user() -> bytes:
    """Return a key that this user's processes on this machine share, which is made with the first call."""
    folder = Path(tempfile.gettempdir(), f"zeromesh-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        require_private(folder)
        file = folder / "key"
        if not file.exists():
            draft = folder / secrets.token_hex(8)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
                output.write(secrets.token_bytes(_SIZE))
            with contextlib.suppress(FileExistsError):
                os.link(draft, file)  # the first one stays where several ranks come at once
            draft.unlink()
        return file.read_bytes()
    except (OSError, ValueError) as error:
        raise StartError(
            f"the ranks of this machine have no key to know each other by: {error}; set {SECRET} to at least "
            f"{LEAST_SECRET} characters that nobody else knows, the same on all ranks, or start them with zeromesh "
            "launch"
        ) from None


def require_private(folder: Path) -> None:
    """Raise ValueError if another user may write into a folder, or has put something else in its place."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o022 or status.st_uid != os.geteuid():
        raise ValueError(
            f"{folder} is not a folder of this user alone (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}), so that others may write files that are run from it; remove it, or "
            "choose a folder with chmod 700 that you own"
        )


class SealedStore(dist.Store):  # type: ignore[name-defined,misc]
    """Key-value store whose values only those who have its key can write or read; counters are as they are.

    Args:
        store: holds the values; strangers may reach it.
        key: of the ranks of one run alone.
        where: address, for messages.
    """

    def __init__(self, store: Any, key: bytes, where: str) -> None:
        super().__init__()
        self.raw, self.key, self.where = store, key, where

    def part(self, prefix: str) -> SealedStore:
        """Return a store of the same connection, with keys of its own."""
        return SealedStore(dist.PrefixStore(prefix, self.raw), sign(self.key, prefix), self.where)  # type: ignore[attr-defined]

    def connect_again(self) -> SealedStore:
        """Return the same store over another connection, which ends with the object."""
        return SealedStore(self.raw.clone(), self.key, self.where)

    def seal(self, key: str, value: bytes | str) -> bytes:
        """Return a value as it is stored; the same one each time, as ``compare_set`` compares them."""
        data = value.encode() if isinstance(value, str) else value
        signature = sign(self.key, key, data)
        return signature + self._mixed(signature, data)

    def unseal(self, key: str, sealed: bytes) -> bytes:
        """Return a value; raise StartError if no rank of this run has stored it under the key."""
        signature, data = sealed[:_SIZE], self._mixed(sealed[:_SIZE], sealed[_SIZE:])
        if not hmac.compare_digest(signature, sign(self.key, key, data)):
            raise StartError(
                f"no rank of this run has written what its store at {self.where} holds under {key!r}: another user or "
                "another run writes there; start the run anew, on another port and where strangers cannot connect"
            )
        return data

    def _mixed(self, signature: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(sign(self.key, "stream", signature)).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    # Torch calls these from C++, too.

    def clone(self) -> SealedStore:
        """Return the same store over another connection, which stays."""
        _alive.append(self.connect_again())
        return _alive[-1]

    def set(self, key: str, value: bytes | str) -> None:
        """Seal a value and store it."""
        self.raw.set(key, self.seal(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it; raise StartError as ``unseal``."""
        self.raw.wait([key], self.timeout)
        return self.unseal(key, self.raw.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values, and return them; raise StartError as ``unseal``."""
        return [self.unseal(key, sealed) for key, sealed in zip(keys, self.raw.multi_get(keys), strict=True)]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store a value if another one is there, none if that is empty; return what is there then."""
        current = self.raw.compare_set(key, self.seal(key, expected) if expected else "", self.seal(key, desired))
        return self.unseal(key, current) if current else b""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is not sealed."""
        return int(self.raw.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self.raw.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self.raw.wait(keys, timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return bool(self.raw.delete_key(key))

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Seal a value and append it to a queue."""
        self.raw.queue_push(key, self.seal(key, value))

    def queue_pop(self, key: str) -> bytes:
        """Wait for the first value of a queue, and take it out."""
        self.raw.set_timeout(self.timeout)
        return self.unseal(key, self.raw.queue_pop(key))

    def queue_len(self, key: str) -> int:
        """Return the length of a queue."""
        return int(self.raw.queue_len(key))


def adopt(store: SealedStore) -> None:
    """Note the store with which the process group of all ranks has been started."""
    _stores[dist.group.WORLD] = store


def shared_store() -> Any:
    """Return the key-value store of all ranks; where the group was started elsewhere, torch's."""
    return _store_of_run() or dist.distributed_c10d._get_default_store()


def _store_of_run() -> SealedStore | None:
    world = dist.group.WORLD
    return None if world is None else _stores.get(world)


def connect_again(store: Any) -> Any:
    """Return a store over another connection: a wait in one thread holds a connection."""
    return store.connect_again() if isinstance(store, SealedStore) else store.clone()


def prove(group: Any, limit: timedelta | None = None) -> Any:
    """Return a process group after its members have shown each other that they belong to this run. Collective.

    gloo takes the first connection that names a rank for that rank's. Raise StartError if it is a stranger's.
    """
    store = _store_of_run()
    if (
        store is None
        or dist.get_rank(group) < 0
        or dist.get_world_size(group) == 1
        or backends(group).get("cpu") != "gloo"
    ):
        return group
    rank, ranks, name = dist.get_rank(group), range(dist.get_world_size(group)), group.group_name

    def proofs(pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
        rows = [sign(store.key, "connection", name, f"{source} {target}") for source, target in pairs]
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(pairs), _SIZE)

    # Straight to each rank: what one of them passes on proves nothing of the connection between two others.
    received = torch.zeros(len(ranks), _SIZE, dtype=torch.uint8)
    try:
        work = dist.all_to_all_single(received, proofs([(rank, peer) for peer in ranks]), group=group, async_op=True)
        work.wait(limit) if limit else work.wait()
        wrong = (received != proofs([(peer, rank) for peer in ranks])).any(1).nonzero().flatten().tolist()
        problem = f"what connected to this rank as rank {wrong[0]} of group {name} cannot prove" if wrong else ""
    except RuntimeError as error:
        problem = f"a rank that rank {rank} of group {name} is connected to does not prove ({error})"
    if problem:
        raise StartError(
            f"{problem} that it belongs to this run: another user or another run has connected in its place, or that "
            "rank has ended; see the other ranks' output, and start the run anew where strangers cannot connect"
        )
    return group


def shared_key(environment: Environment) -> bytes:
    """Return a new key that the ranks of this run alone have; empty if they share nothing secret. Collective."""
    store = _store_of_run()
    if environment.world_size == 1:
        return secrets.token_bytes(_SIZE)
    token = run_token(environment) if store is None else store.key
    # Each rank's part makes it another key each time, so that nothing recorded before is taken again.
    parts = gather_json(secrets.token_hex(_SIZE))
    return sign(token, *parts) if token else b""
