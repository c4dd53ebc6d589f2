"""Time of a run by what it went to, over failures and restarts."""

import json
import time
from pathlib import Path

import pytest

from zeromesh.apps.train.goodput import Spent, TimeLog, read_attempts, totals


def lines(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def at(moment: float, step: int, ends: bool = False, **seconds: float) -> dict[str, object]:
    return {
        "at": moment,
        "step": step,
        "seconds": {Spent[name]: value for name, value in seconds.items()},
        "ends": ends,
    }


THREE = (
    {"began": 100.0, "step": 0},
    at(110.0, 1, START=8.0, STEPS=2.0),
    at(120.0, 5, START=8.0, STEPS=9.0, CHECKPOINTS=3.0),  # the checkpoint of step 5
    at(126.0, 8, START=8.0, STEPS=15.0, CHECKPOINTS=3.0),
    {"began": 140.0, "step": 5},  # the first attempt was killed after step 8
    at(150.0, 6, START=7.0, STEPS=3.0),
    {"began": 151.0, "step": 5},  # and so was the second
    at(170.0, 10, ends=True, START=7.0, STEPS=11.0, DATA=1.0),
    {"began": 1000.0, "step": 10},  # the run had ended, and is continued
    at(1010.0, 12, ends=True, START=4.0, STEPS=5.5, OTHER=0.5),
)


def test_all_time_of_all_attempts_is_accounted_for(tmp_path: Path) -> None:
    found = totals(read_attempts(lines(tmp_path / "time.jsonl", *THREE)))
    assert found == {
        Spent.STEPS: 9 + 11 + 5.5, Spent.REDONE: 6 + 3, Spent.START: 8 + 7 + 7 + 4, Spent.CHECKPOINTS: 3,
        Spent.DOWN: 14 + 1, Spent.DATA: 1, Spent.OTHER: 0.5, Spent.COMPILATION: 0, Spent.EVALUATION: 0, Spent.IDLE: 0,
    }  # fmt: skip
    assert sum(found.values()) == (170 - 100) + (1010 - 1000)


def test_a_file_that_was_cut_off_and_an_attempt_without_records_are_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "time.jsonl", *THREE[:2], {"began": 140.0, "step": 0}, {"began": 150.0, "step": 0})
    path.write_text('{"at": 99.0, "st\n' + path.read_text() + '{"at": 151.0, "st')
    path.write_text(json.dumps(THREE[1]) + "\n" + path.read_text())  # whose beginning was lost
    found = totals(read_attempts(path))
    assert (found[Spent.REDONE], found[Spent.DOWN], found[Spent.STEPS]) == (2, 30 + 10, 0)


def test_a_clock_is_in_one_kind_of_work_at_any_time(tmp_path: Path) -> None:
    path, compiled = lines(tmp_path / "time.jsonl", *THREE), [0.0]
    began = time.time() - 5
    log = TimeLog(path, began, 0, again=False, compiled=lambda: compiled[0])
    with log.spend(Spent.STEPS):
        with log.spend(Spent.DATA):
            time.sleep(0.02)
        time.sleep(0.04)
        compiled[0] = 0.01
    with pytest.raises(OSError, match="full"), log.spend(Spent.CHECKPOINTS):
        raise OSError("full")
    log.record(1, ends=True)
    whole = time.time() - began
    (attempt,) = read_attempts(path)
    found = totals([attempt])
    assert attempt.ends
    assert found[Spent.START] >= 5
    assert found[Spent.DATA] >= 0.019
    assert found[Spent.STEPS] >= 0.029
    assert found[Spent.COMPILATION] == 0.01
    assert sum(found.values()) <= whole + 0.01
    path.write_text(path.read_text() + '{"at": 151.0, "st')
    TimeLog(path, time.time(), 1, again=True).record(2)
    assert len(read_attempts(path)) == 2


def test_a_folder_that_cannot_be_written_to_ends_no_run(tmp_path: Path) -> None:
    log = TimeLog(tmp_path / "missing" / "time.jsonl", time.time(), 0, again=True)
    log.record(1)
    assert read_attempts(tmp_path / "missing" / "time.jsonl") == []
