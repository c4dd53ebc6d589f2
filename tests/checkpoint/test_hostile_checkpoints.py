"""Checkpoints that somebody else has made or altered: they are read as they are, or refused with nothing changed."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import foreign_checkpoints as foreign
import zeromesh
from manifests import boxes_in, content_of, sign, write_manifest
from mutations import mutated
from run import sgd, start_engine, train_step
from runs import seed_everything
from zeromesh import Settings
from zeromesh.apps.launch.signed_rendezvous import read_secret
from zeromesh.apps.plan.cost.source import configuration_of
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.train.data.tokenizer import load_tokenizer
from zeromesh.apps.train.metrics import read_metrics
from zeromesh.base.files import inside
from zeromesh.base.lock import LOCK, locked
from zeromesh.checkpoint import checkpoint_folder as folders
from zeromesh.checkpoint.boxes import Box, Reader
from zeromesh.checkpoint.copies.memory_files import MARK, mark, marked
from zeromesh.checkpoint.formats import deepspeed
from zeromesh.checkpoint.formats.form import Contents, whole
from zeromesh.checkpoint.formats.pickles import Inert, read_tensors
from zeromesh.checkpoint.shard_writer import write_shard
from zeromesh.checkpoint.weights.pretrained import build
from zeromesh.parallel.pipeline.schedule.schedule_files import read_costs

pytestmark = pytest.mark.usefixtures("one_rank")

OUTSIDE = ("../../x", "/x", "..", ".", "", "a/../../x", "a//b", "a\0b", "./x", 3, None)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.norm(self.one(x))).pow(2).mean()


def start(seed: int, stage: int) -> zeromesh.Engine:
    seed_everything(seed)
    settings = {
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2}}, "train_micro_batch_size_per_gpu": 2,
        "fp16": {"enabled": stage == 1},
    }  # fmt: skip
    data = [torch.randn(4) for _ in range(16)]
    return zeromesh.initialize(model=Small(), config=settings, training_data=data)[0]


def train(engine: zeromesh.Engine, updates: int) -> None:
    batches = iter(engine.training_dataloader)
    for _ in range(updates):
        train_step(engine, engine(next(batches)))


def everything(engine: zeromesh.Engine) -> dict[str, str]:
    """All that a load may change, as text, in which NaN equals NaN."""
    found: dict[str, Any] = dict(engine.module.named_buffers())
    for piece in filter(None, engine.sharded.pieces.values()):
        found[piece.name] = piece.parameter.detach()
        found |= {
            f"{piece.name} {key}": value for key, value in engine.optimizer.state.get(piece.parameter, {}).items()
        }
    found["generators"] = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=True)
    groups = engine.optimizer.param_groups
    found["groups"] = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    fields = vars(engine.lr_scheduler)
    found["scheduler"] = {key: value for key, value in fields.items() if key != "optimizer" and not callable(value)}
    loader = engine.training_dataloader
    found["counters"] = engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps
    found["data"] = loader.position, loader.sampler.epoch, loader.sampler.start
    found["others"] = engine.spikes.state(), engine.loss_scaler and engine.loss_scaler.state_dict()
    return {
        name: repr(value.tolist() if isinstance(value, torch.Tensor | numpy.ndarray) else value)
        for name, value in found.items()
    }


@pytest.fixture(params=[3, 1])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[zeromesh.Engine, Path]:
    """Return an engine after one update, and the checkpoint of another after three."""
    other = start(1, request.param)
    train(other, 3)
    client = {"tuple": (1, 2), "tensor": torch.arange(10.0), "array": numpy.float32(3)}
    other.save_checkpoint(tmp_path / "saved", tag="tag", client_state=client)
    engine = start(2, request.param)
    train(engine, 1)
    return engine, tmp_path / "saved"


def named(content: dict[str, Any], key: str) -> Any:
    return content["ranks"][0]["named"][key]


def scheduled(content: dict[str, Any], **values: Any) -> None:
    content["scheduler"] |= values


FAULTS = {
    "a state that is not a number": lambda content: named(content, "scalars")["one.bias"].update(step="three"),
    "a number that its dtype lacks": lambda content: named(content, "scalars")["one.bias"].update(
        step=[2**70, "int32"]
    ),
    "a number without a dtype": lambda content: named(content, "scalars")["one.bias"].update(step=[3, None]),
    "states of a list": lambda content: content["ranks"][0]["named"].update(scalars=[1]),
    "a state that others have": lambda content: named(content, "scalars").pop("one.bias"),
    "data without length": lambda content: content["data"].pop("length"),
    "a negative position": lambda content: content["data"].update(samples=-1),
    "a scale of 0": lambda content: content.update(loss_scaler={"scale": 0.0, "hysteresis": 1, "good_steps": 0}),
    "an option of text": lambda content: content["groups"][0].update(lr="junk"),
    "other parameters": lambda content: content["groups"][0].update(params=[1]),
    "a rate that is none": lambda content: content["groups"][0].update(lr=float("nan")),
    "a group that is none": lambda content: named(content, "members").update({"one.bias": 7}),
    "a scheduler's position": lambda content: scheduled(content, last_epoch="junk"),
    "a scheduler's optimizer": lambda content: scheduled(content, optimizer=3),
    "a client state": lambda content: content["client_state"].update(array={"__numpy__": ["junk", 1]}),
    "a client state of a tensor": lambda content: content["client_state"].update(tensor={"__stored__": ["x"]}),
    "a deep client state": lambda content: content["client_state"].update(deep=json.loads("[" * 900 + "]" * 900)),
    "elements that no box has": lambda content: content["ranks"][0]["boxes"].pop(
        next(at for at, box in enumerate(boxes_in(content)) if box["name"] == "parameter/one.bias")
    ),
    "a tensor that only the index has": lambda content: content["tensors"].update(
        {"optimizer/other/one.bias": content["tensors"]["parameter/one.bias"]}
    ),
    "a tensor that the index lacks": lambda content: content["tensors"].pop("optimizer/exp_avg/one.bias"),
    "steps that are none": lambda content: content.update(global_steps=float("nan")),
    "nothing of the optimizer": lambda content: content.pop("groups"),
}


def test_a_failed_load_changes_nothing(saved: tuple[zeromesh.Engine, Path]) -> None:
    engine, folder = saved
    content, before = content_of(folder / "tag"), everything(engine)
    for name, alter in FAULTS.items():
        altered = json.loads(json.dumps(content))
        alter(altered)
        sign(folder / "tag", altered)
        with pytest.raises(ValueError, match="; |load_module_strict=False loads"):
            engine.load_checkpoint(folder, tag="tag")
        assert everything(engine) == before, name
    sign(folder / "tag", content)
    assert engine.load_checkpoint(folder)[1]["tuple"] == (1, 2)
    assert engine.global_steps == 3


def test_a_state_that_generators_refuse_is_found_before_anything_is_loaded(
    saved: tuple[zeromesh.Engine, Path],
) -> None:
    engine, folder = saved
    content, before = content_of(folder / "tag"), everything(engine)
    (box,) = (box for box in boxes_in(content) if box["name"].startswith("random/"))
    file = folder / "tag" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[slice(*box["bytes"])] = b'{"python": [3, [1, 2], null]}'.ljust(box["bytes"][1] - box["bytes"][0])
    file.write_bytes(data)
    del box["sha256"]
    sign(folder / "tag", content)
    with pytest.raises(ValueError, match="not of the form that is written"):
        engine.load_checkpoint(folder, tag="tag")
    assert everything(engine) == before


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 440), marks=pytest.mark.full)], ids=str)
def test_an_altered_manifest_is_loaded_as_it_is_or_refused_with_nothing_changed(
    seeds: range, saved: tuple[zeromesh.Engine, Path], tmp_path: Path
) -> None:
    engine, folder = saved
    content, before = content_of(folder / "tag"), everything(engine)
    engine.save_checkpoint(tmp_path / "own", tag="tag")
    refused: list[str] = []
    for seed in seeds:
        altered, done = mutated(content, random.Random(seed))
        sign(folder / "tag", altered)
        try:
            engine.load_checkpoint(folder, tag="tag")
        except (ValueError, OSError) as error:
            refused.append(str(error))
            assert everything(engine) == before, (seed, done)
        else:
            assert engine.global_steps == altered["global_steps"], (seed, done)
            engine.load_checkpoint(tmp_path / "own", tag="tag")
            before = everything(engine)
    assert len(refused) > len(seeds) / 2
    # Shapes are compared with the model's before files are opened.
    remedies = ("; ", "load_module_strict=False loads", " is of another model:\n")
    assert not [why for why in refused if not any(remedy in why for remedy in remedies)]


def test_boxes_that_lie_over_each_other_or_leave_gaps_are_refused(tmp_path: Path) -> None:
    values = torch.arange(24.0).view(4, 6)

    def boxes(*areas: tuple[int, int, int, int]) -> list[Box]:
        found = []
        for top, left, height, width in areas:
            data = values[top : top + height, left : left + width].flatten()
            found.append(Box.of("a", (4, 6), 0, data, (top, left), (height, width)))
        return found

    def write(*areas: tuple[int, int, int, int]) -> Reader:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "run").mkdir()
        write_manifest(tmp_path / "run", {"shards": [write_shard(tmp_path / "run", 0, boxes(*areas))]})
        return Reader(tmp_path / "run")

    around = [(0, 0, 1, 5), (0, 5, 3, 1), (3, 1, 1, 5), (1, 0, 3, 1), (1, 1, 2, 4)]
    for sound in ([(0, 0, 4, 6)], [(0, 0, 4, 3), (0, 3, 4, 3)], [(0, 0, 1, 6), (1, 0, 3, 2), (1, 2, 3, 4)], around):
        reader = write(*sound)
        reader.verify()
        assert torch.equal(reader.tensor("a"), values)
    holes = [(0, 0, 4, 5)], [(0, 0, 4, 4), (0, 3, 4, 2)], [(0, 0, 2, 6), (1, 0, 2, 6)], [(0, 0, 1, 6), (3, 0, 1, 6)]
    for holed in holes:
        with pytest.raises(ValueError, match="the boxes of a lack some of its elements, or have some twice"):
            write(*holed).verify()


def test_parts_of_other_libraries_that_leave_gaps_are_refused() -> None:
    def part(start: int, stop: int) -> Box:
        return Box("parameter/a", (6,), torch.float32, start, stop, lambda: torch.ones(stop - start))

    assert whole([part(0, 4), part(4, 6)]).tolist() == [1.0] * 6
    for parts in ([part(0, 4)], [part(0, 4), part(0, 2)], [part(0, 4), part(3, 6)]):
        with pytest.raises(ValueError, match="a lacks some of its 6 elements, or has some twice"):
            whole(parts)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_of_parameters_never_leave_the_folder(name: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names nothing in"):
        inside(tmp_path, name, "the file")
    if not isinstance(name, str) or name in ("", "a\0b"):
        return
    value = {"x": torch.ones(2)}
    contents = {
        "a parameter": Contents("a file", groups=[{"lr": 0.1}], members={name: 0}),
        "a state": Contents("a file", groups=[{"lr": 0.1}], members={"w": 0}),
    }
    contents["a parameter"].add(f"parameter/{name}", value["x"])
    contents["a state"].add("parameter/w", value["x"])
    contents["a state"].add_state("w", f"{name}/y", value["x"][0])
    for what, one in contents.items():
        with pytest.raises(ValueError, match=f"{what} is called"):
            deepspeed.write(one, tmp_path / "in" / "deep", lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert not Path("/x").exists()


def test_a_parameter_with_a_slash_in_its_name_comes_back(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a/b": nn.Linear(2, 2)})
    engine = start_engine(model, optimizer=sgd(0.1), micro=1)
    engine.save_checkpoint(tmp_path / "ours", tag="tag")
    zeromesh.convert_checkpoint(tmp_path / "ours", tmp_path / "theirs", "deepspeed-universal")
    path = zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "back")
    first, last = Reader(tmp_path / "ours" / "tag"), Reader(path)
    assert torch.equal(first.tensor("parameter/a/b.weight"), last.tensor("parameter/a/b.weight"))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/tmp/secret.safetensors"])
def test_an_index_reads_no_file_of_another_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    name = str(tmp_path / "secret.safetensors") if name.startswith("/") else name
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match="names nothing in"):
        zeromesh.convert_checkpoint(tmp_path / "model", tmp_path / "ours")
    foreign.write_universal(tmp_path / "theirs", *foreign.trained_model())
    shutil.copytree(tmp_path / "theirs/global_step3/zero/one.weight", tmp_path / "elsewhere")
    file = tmp_path / "theirs/global_step3/mp_rank_00_model_states.pt"
    held = torch.load(file, weights_only=False)
    held["param_shapes"][0]["../../../elsewhere"] = held["param_shapes"][0].pop("one.weight")
    torch.save(held, file)
    with pytest.raises(ValueError, match=r"a parameter is called '\.\./\.\./\.\./elsewhere'"):
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")


def test_tags_and_what_latest_holds_never_leave_the_folder(tmp_path: Path) -> None:
    engine = start(1, 3)
    engine.save_checkpoint(tmp_path / "other", tag="stolen")
    engine.save_checkpoint(tmp_path / "own", tag="tag")
    for tag in ("../other/stolen", str(tmp_path / "other" / "stolen"), "../x"):
        with pytest.raises(ValueError, match="cannot have the tag"):
            engine.save_checkpoint(tmp_path / "own", tag=tag)
        with pytest.raises(ValueError, match="names nothing in"):
            engine.load_checkpoint(tmp_path / "own", tag=tag)
        (tmp_path / "own" / "latest").write_text(tag)
        assert engine.load_checkpoint(tmp_path / "own")[0] == str(tmp_path / "own" / "tag")
        with pytest.raises(ValueError, match="names nothing in"):
            zeromesh.convert_checkpoint(tmp_path / "own", tmp_path / "new")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to], ids=["symbolic", "hard"])
def test_links_in_place_of_our_files_are_not_followed(link: Any, tmp_path: Path) -> None:
    kept, run = tmp_path / "kept", tmp_path / "run"
    kept.write_text("mine")
    run.mkdir()
    for name in ("latest.draft", "latest", "manifest.json.draft", f"{MARK}.draft"):
        link(run / name, kept)
    folders.write_latest(run, "tag")
    write_manifest(run, {"shards": []})
    mark(run, "zeromesh-0-0123456789abcdef")
    assert marked(run) == "zeromesh-0-0123456789abcdef"
    assert (run / "latest").read_text() == "tag"
    link(run / LOCK, kept)
    with pytest.raises(OSError, match="is a link, or no regular file, and is not written to; delete it"), locked(run):
        pass
    assert kept.read_text() == "mine"
    (run / LOCK).unlink()
    with locked(run):
        assert (run / LOCK).is_file()


def odd_files(path: Path) -> Iterator[str]:
    """Put a FIFO, a device, a folder, and a file that fits in no memory there, one after the other."""
    os.mkfifo(path)
    yield "a FIFO"
    path.unlink()
    path.symlink_to("/dev/zero")
    yield "a device"
    path.unlink()
    path.mkdir()
    yield "a folder"
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(1 << 42)
    yield "more than"
    path.unlink()


def test_a_fifo_is_refused_where_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    readers = {
        "x.json": (Settings.load, Machine.load, read_secret, read_costs),
        "model/config.json": (
            lambda path: configuration_of(path.parent), lambda path: build(path.parent, None, torch.float32, False),
        ),
        "model/tokenizer.json": (load_tokenizer, lambda path: load_tokenizer(path.parent)),
    }  # fmt: skip
    for name, functions in readers.items():
        for _ in odd_files(tmp_path / name):
            for read in functions:
                with pytest.raises((ValueError, OSError)):
                    read(tmp_path / name)
    engine = start(1, 3)
    run = tmp_path / "run"
    engine.save_checkpoint(run, tag="tag")
    shutil.copytree(run, tmp_path / "whole")
    for name in ("latest", MARK, "tag/manifest.json", "tag/rank_00000.safetensors"):
        (run / name).unlink(missing_ok=True)
        for kind in odd_files(run / name):
            if name.startswith("tag/") and not (kind == "more than" and name.endswith(".safetensors")):
                with pytest.raises((ValueError, OSError)):
                    engine.load_checkpoint(run, tag="tag")
            elif not name.startswith("tag/") and kind != "more than":
                assert engine.load_checkpoint(run)[0] == str(run / "tag"), (name, kind)
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "whole", run)
    os.mkfifo(tmp_path / "times.jsonl")
    assert read_metrics(tmp_path / "times.jsonl") == []


def convert_altered(kind: str, seed: int, folder: Path) -> str | None:
    """Alter a checkpoint of another library and convert it; return why it was refused."""
    generator = random.Random(seed)
    source = folder / "source"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model, optimizer = foreign.trained_model()
    if kind == "megatron":
        source.mkdir()
        foreign.write_megatron(source, torch.ones(2, 2, 2))
    else:
        foreign_writers = {
            "dcp": foreign.write_dcp, "universal": foreign.write_universal,
            "zero-1": lambda path, *run: foreign.write_zero(path, 1, 2, *run),
            "zero-3": lambda path, *run: foreign.write_zero(path, 3, 2, *run),
        }  # fmt: skip
        foreign_writers[kind](source, model, optimizer)
    files = [path for pattern in ("**/*.pt", ".metadata") for path in sorted(source.glob(pattern))]
    file = generator.choice(files)
    for _ in range(20):
        try:  # some classes of torch refuse to be written with other values
            if file.suffix == ".pt":
                altered, _ = mutated(read_any(file), generator)
                torch.save(altered, file)
            else:
                altered, _ = mutated(pickle.loads(file.read_bytes()), generator)
                file.write_bytes(pickle.dumps(altered))
            break
        except (RuntimeError, AttributeError):
            continue
    to = generator.choice(["zeromesh", "hf", "dcp", "deepspeed-universal"])
    try:
        zeromesh.convert_checkpoint(source, folder / "out" / "target", to, model=generator.choice([model, None]))
    except (ValueError, OSError) as error:
        left = folder / "out" / "target"
        assert not left.exists() or not any(left.rglob("*")), (kind, seed)
        return str(error)
    assert {path.name for path in folder.iterdir()} == {"source", "out"}
    return None


def read_any(file: Path) -> Any:
    """Read a file of ours, of which stand-ins for other libraries' classes are left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)((key, plain(one)) for key, one in value.items())
        if isinstance(value, list):
            return [plain(one) for one in value]
        return None if isinstance(value, Inert) else value.clone() if isinstance(value, torch.Tensor) else value

    return plain(read_tensors(file))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 126), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("kind", ["zero-1", "zero-3", "universal", "dcp", "megatron"])
def test_altered_checkpoints_of_other_libraries_are_converted_or_refused(
    kind: str, seeds: range, tmp_path: Path
) -> None:
    told = [convert_altered(kind, seed, tmp_path / "altered") for seed in seeds]
    assert any(told)
    assert all("; " in why for why in told if why is not None)
