"""Scripts in the style of DeepSpeed's examples, with one changed line and two ranks, equal plain torch."""

import pytest

from deepspeed_scripts import SCRIPTS, run
from harness import run_ranks


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in SCRIPTS for stage in ((0, 1) if name == "alexnet" else (2, 3))]
)
def test_scripts_with_one_changed_line_equal_plain_torch(name: str, stage: int) -> None:
    wanted = SCRIPTS[name](None, stage)
    (found, *_) = run_ranks(run, 2, name, stage)
    assert found == pytest.approx(wanted, rel=1e-5)
