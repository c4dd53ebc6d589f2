"""Sums and checksums of the native library, and that it is part of what is distributed."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeromesh.base.kernels import native, sums
from zeromesh.base.kernels.native import library
from zeromesh.base.kernels.sums import add, checksum, sum_of_squares

ROOT = Path(__file__).parents[2]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        checksum(torch.ones(4, 4).t())
    with pytest.raises(ValueError, match="threads is -1"):
        checksum(torch.ones(4), threads=-1)


SIZES = (0, 1, 15, 16, 17, 65_536, 200_003)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares(dtype: torch.dtype, size: int) -> None:
    built = library()
    assert built is not None
    values = torch.randn(size + 3).to(dtype)[3:]  # not where a vector begins
    expected = values.double().square().sum().item()
    found = {
        sum_of_squares(values, threads, instructions).item() for instructions in built.sets for threads in (1, 2, 3)
    }
    assert len(found) == 1
    assert found.pop() == pytest.approx(expected, rel=1e-12)
    with patch.object(sums, "library", lambda: None):
        # Each of a row's 1,024 squares and its sum are rounded to fp32, in a tree of vectors.
        assert sum_of_squares(values).item() == pytest.approx(expected, rel=1e-5)


def test_sums_of_squares_beyond_the_range_of_16_bits() -> None:
    values = torch.full((5000,), 60_000.0, dtype=torch.float16)
    for library_of in (library, lambda: None):
        with patch.object(sums, "library", library_of):
            assert sum_of_squares(values).item() == pytest.approx(5000 * values[0].double().item() ** 2, rel=1e-5)


def test_sums_of_squares_of_large_numbers() -> None:
    values = torch.full((100,), 3e38)
    assert sum_of_squares(values).sqrt().item() == pytest.approx(3e39)
    for odd in (torch.inf, torch.nan):
        values[7] = odd
        assert not sum_of_squares(values).isfinite()
    assert sum_of_squares(torch.ones(2050, dtype=torch.float64)).item() == 2050


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)],
)
def test_sums_of_two_types_have_torchs_bits(wide: torch.dtype, narrow: torch.dtype, size: int) -> None:
    target, values = torch.randn(size + 1).to(wide)[1:], torch.randn(size).to(narrow)
    expected, version = target.clone().add_(values), target._version
    add(target, values)
    assert torch.equal(target, expected)
    assert target._version == version + 1
    spread = torch.zeros(2 * size, dtype=wide)[::2]
    add(spread, values)
    assert torch.equal(spread, torch.zeros(size, dtype=wide).add_(values))


def test_tensors_whose_memory_is_not_their_value() -> None:
    plain = torch.arange(1.0, 5.0, dtype=torch.bfloat16)
    for values in (torch._neg_view(plain), torch._efficientzerotensor(4, dtype=torch.bfloat16)):
        target = torch.ones(4)
        add(target, values)
        assert torch.equal(target, 1 + values.clone().float())
        assert sum_of_squares(values).item() == pytest.approx(values.clone().double().square().sum().item())
    with FakeTensorMode() as mode:
        assert sum_of_squares(mode.from_tensor(plain)).shape == ()


MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 63, 64, 65, MIB, MIB + 1, 3 * MIB + 77])
def test_checksums_notice_changes(size: int) -> None:
    data = torch.randint(256, (size,), dtype=torch.uint8)
    before = checksum(data)
    assert 0 <= before < 1 << 64
    for threads in (1, 2, 3):
        assert checksum(data, threads) == before
    seen = {before}
    for place in {0, size // 2, size - 1, min(size - 1, MIB)}:
        for bit in (1, 128):
            data[place] ^= bit
            seen.add(checksum(data))
            data[place] ^= bit
    assert len(seen) == 1 + 2 * len({0, size // 2, size - 1, min(size - 1, MIB)})
    assert checksum(data) == before
    assert checksum(data[:-1]) != before


def test_checksums_depend_on_where_and_how_much() -> None:
    words = torch.randn(1 << 20)
    found = [checksum(words)]
    for swapped in (slice(0, 16), slice(0, 32), slice(0, 1 << 18), slice(0, 1 << 19)):
        other = words.clone()
        half = swapped.stop // 2
        other[:half], other[half : swapped.stop] = words[half : swapped.stop], words[:half]
        found.append(checksum(other))
    signs = words.clone()
    signs[[1, 17]] *= -1  # the highest bits of two words that go into the same sum
    found.append(checksum(signs))
    found += [checksum(torch.zeros(size)) for size in (0, 1, 2, 16, 17, 1 << 18, 1 << 19)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("size", [0, 1, 100, MIB, 2 * MIB + 4097])
def test_checksums_are_the_same_without_the_library(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(256, (size,), dtype=torch.uint8)
    expected = checksum(data)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    library.cache_clear()
    try:
        assert checksum(data) == expected
    finally:
        library.cache_clear()


def sources(folder: Path) -> Path:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "zeromesh" / "base" / "kernels", folder / "zeromesh" / "base" / "kernels", ignore=ignored)
    for name in ("__init__.py", "base/__init__.py", "base/version.py"):
        shutil.copy(ROOT / "zeromesh" / name, folder / "zeromesh" / name)
    return folder


def setup(folder: Path, *command: str, **environment: str) -> str:
    variables = {**os.environ, **environment}
    run = subprocess.run(
        [sys.executable, "setup.py", *command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stderr


def test_the_sources_are_distributed(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    setup(sources(tmp_path), "sdist")
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {Path(name).name for name in opened.getnames()}
    assert names >= {"setup.py", *(path.name for path in (ROOT / "zeromesh" / "base" / "kernels").glob("*.[ch]"))}


@pytest.mark.full
def test_wheels_and_editable_installs_have_the_library(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = sources(tmp_path)
    setup(folder, "build")
    (library,) = folder.glob("build/lib*/zeromesh/base/kernels/_native*")
    setup(folder, "build_ext", "--inplace")  # as an editable installation does
    assert [path.name for path in (folder / "zeromesh" / "base" / "kernels").glob("_native*")] == [library.name]
    ignored = subprocess.run(
        ["git", "check-ignore", "--quiet", f"zeromesh/base/kernels/{library.name}"], cwd=ROOT, check=False
    )
    assert ignored.returncode == 0 or not (ROOT / ".git").exists()


def test_no_compiler_is_no_failure(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    said = setup(sources(tmp_path), "build", CC=str(tmp_path / "no-such-compiler"))
    assert "failed" in said
    assert not list(tmp_path.rglob("_native*.so"))
    assert list(tmp_path.glob("build/lib*/zeromesh/base/kernels/update_pass.py"))
