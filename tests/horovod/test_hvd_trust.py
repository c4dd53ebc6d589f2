"""Objects and committed states that no rank of the run has made are not unpickled."""

import os
import pickle
from pathlib import Path

import pytest
import torch

import zeromesh.horovod as hvd
from harness import on_ranks
from malicious import Malicious
from zeromesh.comm.trust import LASTING
from zeromesh.horovod import elastic, functions
from zeromesh.horovod import world as worlds


@on_ranks(2)
def test_objects_that_no_rank_of_the_run_has_signed_are_refused() -> None:
    hvd.init()
    assert hvd.broadcast_object({"of": hvd.rank()}, 1) == {"of": 1}
    assert hvd.allgather_object(("of", hvd.rank())) == [("of", 0), ("of", 1)]
    mark = Path(f"unpickled-{os.getpid()}")
    for forged in (pickle.dumps(Malicious(mark)), b"0" * 32 + pickle.dumps(Malicious(mark)), b""):
        with pytest.raises(ValueError, match="broadcast_object received what no rank of this run has sent"):
            functions._unpickled("broadcast_object", forged)
    assert not mark.exists()
    # As on several nodes without a secret.
    worlds.world_for("this test").key = b""
    for call in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises(ValueError, match="ranks of several nodes share no secret; set ZEROMESH_SECRET"):
            call(1)
    hvd.shutdown()


@on_ranks(2)
def test_optimizer_states_need_no_signature() -> None:
    hvd.init()
    worlds.world_for("this test").key = b""
    rank = hvd.rank()
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    optimizer = torch.optim.Adam([parameter], lr=0.1 * (1 + rank), betas=(0.5 + 0.1 * rank, 0.9))
    parameter.grad = torch.full((3,), 1.0 + rank)
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 1)
    (group,), (state,) = optimizer.param_groups, optimizer.state.values()
    assert (group["lr"], group["betas"]) == (0.2, (0.6, 0.9))
    assert state["exp_avg"].tolist() == pytest.approx([0.8] * 3)
    assert (state["step"].item(), state["step"].dtype, state["step"].shape) == (1.0, torch.float32, ())
    optimizer.state[parameter]["own"] = object()
    with pytest.raises(ValueError, match=r"optimizer of rank 0 cannot be sent.*a object"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.shutdown()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a committed state."""
    monkeypatch.setenv(elastic.FOLDER, str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv(LASTING, "k" * 64)
    tmp_path.chmod(0o777)  # a folder that others may write to
    file = elastic.state_file()
    assert file is not None
    elastic._write(file, memoryview(b"committed"))
    return file


def test_a_committed_state_comes_back_from_a_folder_of_its_own(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes(elastic._read(state) or b"") == b"committed"
    assert state.parent.stat().st_mode & 0o777 == 0o700
    elastic._write(state, memoryview(b"later"))
    assert bytes(elastic._read(state) or b"") == b"later"
    state.unlink()
    assert elastic._read(state) is None


def test_states_that_the_run_has_not_committed_are_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, target = state.read_bytes(), state.with_name("target")
    forgeries = [pickle.dumps(Malicious(state.with_name("mark"))), signed[:-1], b"", signed[:32] + b"Committed"]
    for forged in forgeries:
        state.write_bytes(forged)
        with pytest.raises(ValueError, match="is not the state that this run has committed"):
            elastic._read(state)
    state.write_bytes(signed)
    with monkeypatch.context() as patch:
        patch.setenv(LASTING, "o" * 64)  # of another run
        with pytest.raises(ValueError, match="remove it, and start the run anew"):
            elastic._read(state)
    state.rename(target)
    target.write_bytes(forgeries[0])
    state.symlink_to(target)
    with pytest.raises(ValueError, match="is not the state"):
        elastic._read(state)
    state.unlink()
    os.mkfifo(state)
    with pytest.raises(ValueError, match="is not the state"):
        elastic._read(state)


def test_nothing_is_written_through_links_or_in_folders_of_others(state: Path) -> None:
    victim = state.parent.parent / "victim"
    victim.write_text("mine")
    state.with_suffix(".part").symlink_to(victim)
    elastic._write(state, memoryview(b"new"))
    assert (victim.read_text(), bytes(elastic._read(state) or b"")) == ("mine", b"new")
    state.parent.chmod(0o777)
    for call in (lambda: elastic._read(state), lambda: elastic._write(state, memoryview(b"new"))):
        with pytest.raises(ValueError, match="is not a folder of this user alone"):
            call()
