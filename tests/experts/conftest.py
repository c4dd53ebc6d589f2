"""A folder with a tiny mixture."""

from pathlib import Path

import pytest

from test_expert_adapters import build


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    build("mixtral").save_pretrained(path)
    return path
