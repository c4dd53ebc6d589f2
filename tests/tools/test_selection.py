"""Parts of the tests, records of their outcomes, and a second try of the few that failed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import conftest
import test_again  # type: ignore[import-not-found]
import test_all  # type: ignore[import-not-found]


def left(names: list[str], **options: str) -> list[str]:
    config: Any = SimpleNamespace(
        getoption=lambda name: options.get(name.removeprefix("--")),
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    items: list[Any] = [type("Item", (), {"nodeid": name})() for name in names]
    conftest.pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items]


def test_some_cases_hold_as_many_values_as_they_can() -> None:
    cases = [conftest.values_of("case", {"row": row, "mesh": (2, data)}) for row in range(4) for data in (1, 2)]
    taken = conftest.chosen(cases, 4)
    assert set().union(*(cases[number] for number in taken)) == set().union(*cases)
    alike: list[set[str]] = [set() for _ in range(10)]
    assert conftest.chosen(alike, 2) == {0, 5}, "where there is nothing to choose by, they are spread evenly"
    assert conftest.chosen(alike, 99) == set(range(10))


def test_parts_are_disjoint_and_all_tests_together() -> None:
    names = [f"tests/test_some.py::test_{number}" for number in range(200)]
    parts = [left(names, part=f"{number}/8") for number in range(8)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(10 < len(part) < 40 for part in parts)
    assert left(names) == names


def test_recorded_tests_are_not_run_again(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    assert left(["a", "b"], record=str(record)) == ["a", "b"]
    record.write_text(json.dumps({"test": "a", "outcome": "passed", "seconds": 1.0}) + '\n{"test": "b", "outc')
    assert left(["a", "b"], record=str(record)) == ["b"], "a line that was cut off does not count"


def test_an_outcome_is_the_worst_of_the_phases(tmp_path: Path) -> None:
    recorder = conftest.Recorder(tmp_path / "record.jsonl")
    phases = {"good": "ppp", "bad": "pfp", "skipped": "s-p", "torn": "ppf"}  # a skipped test has no call
    for test, letters in phases.items():
        for when, letter in zip(("setup", "call", "teardown"), letters, strict=True):
            outcome = {"p": "passed", "f": "failed", "s": "skipped", "-": ""}[letter]
            report: Any = SimpleNamespace(nodeid=test, when=when, outcome=outcome, duration=0.5)
            if outcome:
                recorder.pytest_runtest_logreport(report)
    rows = conftest.outcomes(tmp_path / "record.jsonl")
    assert {row["test"]: row["outcome"] for row in rows} == {
        "good": "passed", "bad": "failed", "skipped": "skipped", "torn": "failed",
    }  # fmt: skip


def test_the_page_counts_the_last_outcome_and_names_what_failed() -> None:
    rows = [
        {"test": "tests/shard/test_a.py::test_x[1]", "outcome": "failed", "seconds": 3.0},
        {"test": "tests/test_b.py::test_y", "outcome": "failed", "seconds": 1.0},
        {"test": "tests/test_b.py::test_z", "outcome": "passed", "seconds": 1.0},
        {"test": "tests/shard/test_a.py::test_x[1]", "outcome": "passed", "seconds": 2.0},
    ]
    page = test_all.page(rows, "0123456789")
    assert "2 passed, 1 failed, 0 skipped" in " ".join(page.split())
    assert "Failed:\n\n- `test_b`: `test_y`\n" in page
    assert "Failed in the run, passed alone:\n\n- `shard/test_a`: `test_x[1]`\n" in page
    assert "| shard/test_a | 1 | 0 | 0 | 2 |" in page


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("failed", "status", "said"),
    [
        (["test_it.py::test_good"], 0, "FLAKY: test_it.py::test_good"),
        (["test_it.py::test_good", "test_it.py::test_bad"], 1, "FAILED TWICE: test_it.py::test_bad"),
        ([f"test_it.py::test_{number}" for number in range(4)], 1, "4 tests failed"),
        ([], 1, "0 tests failed"),
    ],
)
def test_a_few_failed_tests_are_tried_once_more(
    failed: list[str], status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    (tmp_path / "test_it.py").write_text("def test_good():\n    pass\n\n\ndef test_bad():\n    assert False\n")
    (tmp_path / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    monkeypatch.setattr(test_again, "ROOT", tmp_path)
    monkeypatch.setattr(test_again, "FAILED", tmp_path / "lastfailed")
    assert test_again.main() == status
    assert said in capsys.readouterr().out
