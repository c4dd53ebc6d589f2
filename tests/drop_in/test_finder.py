"""The table of the drop-in resolves, under both names to the same objects, and refuses with a remedy."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from zeromesh.deepspeed import names, stand_ins

ALIASED = """
import importlib.metadata, importlib.util, sys
import zeromesh.deepspeed
zeromesh.deepspeed.install()
import deepspeed
assert "torch" not in sys.modules, "importing is to be cheap"
assert deepspeed is zeromesh.deepspeed
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.util.find_spec("deepspeed.zero") is not None
version = importlib.metadata.version("deepspeed")
assert version == deepspeed.__version__ and tuple(map(int, version.split("+")[0].split("."))) >= (0, 18, 2)
assert [found.metadata["Name"] for found in importlib.metadata.distributions(name="deepspeed")] == ["deepspeed"]
assert "deepspeed" in {found.metadata["Name"] for found in importlib.metadata.distributions()}
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
import deepspeed.runtime.engine as engine, zeromesh.deepspeed.runtime.engine as own
assert engine is own and engine is deepspeed.runtime.engine
assert deepspeed.zero is deepspeed.runtime.zero and deepspeed.zero.ZeroParamStatus is ZeroParamStatus
assert deepspeed.DeepSpeedEngine is engine.DeepSpeedEngine
assert {"initialize", "zero", "comm"} <= set(dir(deepspeed)) and "Init" in dir(deepspeed.zero)
from deepspeed.zero import *
assert Init is deepspeed.zero.Init
assert deepspeed.runtime.engine.__spec__.name == "zeromesh.deepspeed.runtime.engine"
from deepspeed import InferenceEngine, init_inference
import deepspeed.inference.engine
from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.ops.aio import AsyncIOBuilder
assert UNIVERSAL_CHECKPOINT_INFO == "universal_checkpoint_info" and not AsyncIOBuilder().is_compatible()
assert not isinstance(model := object(), InferenceEngine) and not hasattr(InferenceEngine, "destroy")
for line, kind, words in (
    ("init_inference(model)", NotImplementedError, "engine for inference"),
    ("deepspeed.inference.engine.InferenceEngine(model)", NotImplementedError, "engine for inference"),
    ("type('Mine', (InferenceEngine,), {})()", NotImplementedError, "engine for inference"),
    ("InferenceEngine.destroy", NotImplementedError, "engine for inference"),
    ("if init_inference: pass", NotImplementedError, "engine for inference"),
    ("import deepspeed.engine", ModuleNotFoundError, "has no deepspeed.engine"),
    ("deepspeed.nothing", AttributeError, "has no deepspeed.nothing"),
    ("from deepspeed.zero import nothing", ImportError, "nothing"),
):
    try:
        exec(line)
    except kind as error:
        assert words in str(error), (line, str(error))
    else:
        raise AssertionError(line)
"""

SECOND = """
import sys, types
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
import zeromesh.deepspeed
try:
    zeromesh.deepspeed.install()
except ImportError as error:
    assert "python -m zeromesh.deepspeed" in str(error)
else:
    raise AssertionError
"""

UNINSTALLED = """
import importlib.metadata, sys
import zeromesh.deepspeed.runtime.zero
for look in (lambda: importlib.metadata.version("deepspeed"), lambda: __import__("deepspeed")):
    try:
        look()
    except ImportError:
        continue
    raise AssertionError
"""


def test_every_module_and_name_of_deepspeed_can_be_imported() -> None:
    package = importlib.import_module(names.OWN)
    assert package.runtime.constants.TRAIN_BATCH_SIZE_DEFAULT is None
    assert package.__version__.startswith(f"{package.__version_major__}.{package.__version_minor__}.")
    for dotted, row in stand_ins.table().items():
        module = importlib.import_module(f"{names.OWN}.{dotted}".rstrip("."))
        for name in [*row.get("", "").split(), *(name for name in row if name.strip("*"))]:
            getattr(module, name)
        with pytest.raises(AttributeError):
            module._no_such_name  # noqa: B018


@pytest.mark.parametrize("module", sorted(names.HOMES | names.SAME))
def test_every_name_of_the_table_has_a_home(module: str) -> None:
    found = importlib.import_module(f"{names.OWN}.{module}".rstrip("."))

    for name, (home, other) in names.names(module).items():
        assert getattr(found, name) is getattr(importlib.import_module(home), other), name
        assert names.remedy(f"{module}.{name}".lstrip(".")) is None, "it is refused as well"


@pytest.mark.parametrize("program", [pytest.param(ALIASED, marks=pytest.mark.full), SECOND, UNINSTALLED])
def test_programs_find_the_drop_in(program: str, tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)

    assert found.returncode == 0, found.stderr
