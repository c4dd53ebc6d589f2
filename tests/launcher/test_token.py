"""Ranks of a launch get a token that strangers do not see, another one for each start and launch."""

from pathlib import Path

from zeromesh.apps.launch.agent import _Output
from zeromesh.comm.trust import LASTING, TOKEN


def keys(folder: Path, secret: bytes, *ports: int) -> list[dict[str, str]]:
    """Return the variables of rank 1 in starts of one launch."""
    output = _Output(folder, {}, False, secret)
    starts = []
    for port in ports:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
        place |= {"TORCHELASTIC_RESTART_COUNT": "0"}
        envs = {local: {"RANK": str(local), **place} for local in range(2)}
        output.reify(envs)
        assert envs[0][TOKEN] == envs[1][TOKEN]
        starts.append(envs[1])
    return starts


def test_each_start_of_the_ranks_has_a_token_of_its_own(tmp_path: Path) -> None:
    first, second = keys(tmp_path, b"", 1, 2)
    (other,) = keys(tmp_path, b"", 1)
    assert len({first[TOKEN], second[TOKEN], other[TOKEN]}) == 3
    assert first[LASTING] == second[LASTING] != other[LASTING]  # what one start leaves, the next one trusts
    assert all(len(one[name]) == 64 for one in (first, second, other) for name in (TOKEN, LASTING))


def test_nodes_with_one_secret_have_one_token_which_does_not_show_it(tmp_path: Path) -> None:
    secret = b"of all nodes of this test"
    (first,), (second,), (stranger,) = (keys(tmp_path, one, 1) for one in (secret, secret, b"another secret " * 2))
    assert first[TOKEN] == second[TOKEN] != stranger[TOKEN]
    assert secret.decode() not in str(first)
