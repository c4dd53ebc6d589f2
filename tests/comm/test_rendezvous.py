"""Launchers are reached from this machine only, or run nothing that is not signed."""

import base64
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness import free_port, run_command
from malicious import Malicious
from zeromesh.apps.launch.signed_rendezvous import read_secret

LAUNCH = [sys.executable, "-m", "zeromesh.apps.cli.main", "launch"]
SECRET = "of all nodes of these tests"

LISTENING = """
import ipaddress, os, socket, struct, pathlib, sys
import torch, torch.distributed as dist, zeromesh
zeromesh.init_distributed()
dist.all_reduce(torch.ones(1))

def sockets(process):
    for entry in pathlib.Path("/proc", str(process), "fd").iterdir():
        try:
            yield os.readlink(entry)
        except OSError:
            pass

mine = {link for process in (os.getpid(), os.getppid()) for link in sockets(process)}
for table, size in (("tcp", 4), ("tcp6", 16)):
    for row in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
        fields = row.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
            words = bytes.fromhex(fields[1].partition(":")[0])
            raw = b"".join(words[at:at + 4][::-1] for at in range(0, size, 4))
            address = ipaddress.ip_address(raw)
            address = getattr(address, "ipv4_mapped", None) or address
            print("listens:", address, address.is_loopback, flush=True)
dist.barrier()
zeromesh.zero  # the library was used
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_the_launcher_and_the_ranks_of_one_node_listen_on_loopback_only(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LISTENING)
    finished = run_command([*LAUNCH, "--nproc", "2", script])
    found = [line for line in finished.stdout.splitlines() if "listens:" in line]
    assert len(found) >= 2, finished.stdout
    assert all(line.endswith("True") for line in found), finished.stdout


@pytest.mark.full
def test_messages_of_strangers_to_the_rendezvous_are_not_unpickled(tmp_path: Path) -> None:
    port, mark, script = free_port(), tmp_path / "mark", tmp_path / "script.py"
    script.write_text("print('ran')")
    options = ["--nproc", "1", "--nnodes", "2", "--node-rank", "0", "--master", f"127.0.0.1:{port}", "--timeout", "60"]
    process = subprocess.Popen(
        [*LAUNCH, *options, str(script)], env=os.environ | {"ZEROMESH_SECRET": SECRET},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        store = _store(port, process)
        attack = base64.b64encode(b"0" * 32 + pickle.dumps(Malicious(str(mark))))
        limit = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < limit:
            try:
                store.set("torch.rendezvous.zeromesh", attack)
            except RuntimeError:
                break  # it has ended
            time.sleep(0.1)
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 2, output
    assert "is not signed with this node's secret" in output
    assert "pass the same --secret-file on every node" in output
    assert not mark.exists()


def _store(port: int, process: subprocess.Popen[str]) -> Any:
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    while process.poll() is None:
        try:
            return store("127.0.0.1", port, None, False, wait_for_workers=False)
        except RuntimeError:
            time.sleep(0.2)
    raise AssertionError(process.communicate()[0])


def test_several_nodes_need_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROMESH_SECRET", raising=False)
    script = tmp_path / "script.py"
    script.touch()
    finished = run_command([*LAUNCH, "--nnodes", "2", "--master", "127.0.0.1:1", script])
    assert finished.returncode == 2
    assert "--nnodes 2 needs --secret-file FILE" in " ".join(finished.stdout.split())


def test_secrets_that_others_may_read_or_guess_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROMESH_SECRET", raising=False)
    file = tmp_path / "secret"
    assert read_secret(None) == b""
    with pytest.raises(ValueError, match="cannot be read"):
        read_secret(file)
    file.write_text(SECRET + "\n")
    file.chmod(0o640)
    with pytest.raises(ValueError, match="has the mode 640.*chmod 600"):
        read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == SECRET.encode()
    file.write_text("short")
    with pytest.raises(ValueError, match="has 5 bytes, but must have at least 16"):
        read_secret(file)
    monkeypatch.setenv("ZEROMESH_SECRET", SECRET)
    assert read_secret(None) == SECRET.encode()
