"""The axes of the mesh are one table, and a new axis is a row of it and a size in the configuration."""

import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import zeromesh
from harness import FOLDERS, run_command
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.base.axes import AXES, data_size, shard_size
from zeromesh.config.feature_sections import MeshSizes


def test_the_configuration_has_a_size_for_each_axis() -> None:
    assert [*MeshSizes.model_fields] == [*AXES]


def test_the_planner_has_a_size_for_each_axis() -> None:
    assert {*AXES} <= {field.name for field in fields(ParallelLayout)}


def test_sizes_of_the_batch_and_of_shard_groups_are_products() -> None:
    sizes = dict(zip(AXES, (2, 3, 5, 7, 11, 13), strict=True))
    assert data_size(sizes) == 2 * 3
    assert shard_size(sizes) == 3 * 7


PLACES = {
    "base/axes.py": {
        '    "expert": AxisRole(folded=True),\n': '    "expert": AxisRole(folded=True),\n'
        '    "echo": AxisRole(copies=True),\n'
    },
    "config/feature_sections.py": {
        "    expert: PositiveInt = key(\n": '    echo: PositiveInt = key(1, "Ranks with the same samples.")\n'
        "    expert: PositiveInt = key(\n"
    },
}
"""Places of a new axis: texts in them, and what they become."""

PROGRAM = """
import sys
sys.path[:0] = {tests!r}
import pytest, torch, zeromesh
from torch import nn
from run import adamw, start_engine
from zeromesh.apps.plan.choose.layout_documents import layout_from

FOLDER = {folder!r}

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double()

def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, 5, generator=generator, dtype=torch.float64)

def plain():
    replica = model()
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    losses = []
    for x in batches():
        loss = replica(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, replica.state_dict()

def train(stage, axis, first, stop, folder):
    engine = start_engine(
        model(), optimizer=adamw(0.01), stage=stage, micro=4, clipping=0.1, mesh={{axis: 2}}
    )
    assert engine.train_batch_size() == (4 if axis == "echo" else 8)
    if first:
        engine.load_checkpoint(folder)
    losses = []
    for x in batches()[first:stop]:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if axis == "echo":
        engine.save_checkpoint(folder)
    state = dict(engine.state_dict())
    engine.destroy()
    return losses, state

def run():
    expected, weights = plain()
    for stage in (0, 3):
        losses, _ = train(stage, "echo", 0, 3, f"{{FOLDER}}/{{stage}}")
        more, state = train(stage, "echo", 3, 6, f"{{FOLDER}}/{{stage}}")
        # In float64; the norm adds up its parts in another order.
        assert losses + more == pytest.approx(expected, rel=1e-12), stage
        torch.testing.assert_close(state, dict(weights), rtol=1e-12, atol=1e-14)
        # The checkpoint of copies is one of data-parallel ranks, too.
        assert train(stage, "data", 3, 3, f"{{FOLDER}}/{{stage}}")[0] == []

if __name__ == "__main__":
    assert zeromesh.__file__.startswith(FOLDER)
    zeromesh.launch(run, 2)
    settings = zeromesh.Settings.load({{"train_batch_size": 4, "mesh": {{"echo": 2}}}})
    with pytest.raises(ValueError, match="mesh.echo is 2, and the planner does not know what it costs"):
        layout_from(settings, 2)
    print("trained")
"""


@pytest.mark.full
def test_an_axis_is_added_in_two_places_and_its_ranks_train_as_one_process(tmp_path: Path) -> None:
    package = tmp_path / "zeromesh"
    shutil.copytree(Path(zeromesh.__file__).parent, package)
    for name, changes in PLACES.items():
        source = (package / name).read_text()
        for text, changed in changes.items():
            assert text in source
            source = source.replace(text, changed, 1)
        (package / name).write_text(source)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=[str(tmp_path), *FOLDERS], folder=str(tmp_path)))
    ended = run_command([sys.executable, program], timeout=120)
    assert ended.returncode == 0, ended.stdout
    assert "trained" in ended.stdout


def test_the_page_for_contributors_names_these_places_of_an_axis() -> None:
    page = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| an axis of the mesh |")]
    assert all(f"zeromesh/{name}" in row for name in PLACES)
