"""Conversion of checkpoints from and to the formats of other libraries."""

import io
import logging
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import foreign_checkpoints as foreign
import zeromesh
from commands import call
from compare import assert_same
from harness import FOLDERS, ROOT, on_ranks, run_command
from malicious import Malicious
from manifests import whole_manifest
from run import start_engine, train_step
from zeromesh.checkpoint.boxes import Reader


class Plain(nn.Module):
    """As many tensors as the optimizer has parameters, so that their order is all that Lightning needs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.head = nn.Linear(7, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def tensors(path: Path) -> dict[str, torch.Tensor]:
    reader = Reader(path)
    reader.verify()
    return {name: reader.tensor(name) for name in reader.names}


WRITERS: dict[str, Callable[[Path, Any, Any], None]] = {
    "zero-0": lambda folder, *run: foreign.write_zero(folder, 0, 2, *run),
    "zero-1": lambda folder, *run: foreign.write_zero(folder, 1, 2, *run),
    "zero-2": lambda folder, *run: foreign.write_zero(folder, 2, 3, *run),
    "zero-3": lambda folder, *run: foreign.write_zero(folder, 3, 2, *run),
    "zero-3-many": lambda folder, *run: foreign.write_zero(folder, 3, 6, *run),
    "universal": foreign.write_universal,
    "dcp": foreign.write_dcp,
    "dcp-flat": lambda folder, *run: foreign.write_dcp(folder, *run, flatten=True),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_an_imported_checkpoint_has_the_values_and_states_of_the_other_library(kind: str, tmp_path: Path) -> None:
    model, optimizer = foreign.trained_model()
    WRITERS[kind](tmp_path / "theirs", model, optimizer)
    path = zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", model=model)
    assert_same(tensors(path), foreign.everything(model, optimizer))
    manifest = whole_manifest(path)
    assert manifest["global_steps"] == 3
    assert "AdamW" in manifest["optimizer"]
    assert manifest["scalars"]["one.bias"]["step"] == [3.0, "float32"]
    assert manifest["members"]["one.weight"] != manifest["members"]["one.bias"]
    assert [group["weight_decay"] for group in manifest["groups"]] == [0.1, 0.0]
    assert manifest["scheduler"]
    assert not kind.startswith("zero") or manifest["scheduler_type"] == "WarmupLR"
    assert not kind.startswith("zero") or manifest["client_state"] == {"best": 0.5}


def resume(folder: str, row: int, again: Path | None = None, **layout: Any) -> None:
    torch.manual_seed(9)
    model = foreign.Small()
    optimizer = torch.optim.AdamW(foreign.groups(model), lr=0.5, foreach=False)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": row}} | layout
    engine = zeromesh.initialize(model=model, optimizer=optimizer, config=settings)[0]
    engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert engine.global_steps == 3
    if again is not None:
        engine.save_checkpoint(again)
    # Sums over split tensors are in another order, and the host's kernel is not torch's.
    if layout:
        return
    for number in (3, 4):
        train_step(engine, engine(foreign.tokens(number)))
    plain, optimizer = foreign.trained_model()
    foreign.step(plain, optimizer, 2, first=3)
    state = engine.gathered_state_dict()
    if torch.distributed.get_rank() == 0:
        assert_same({name: value for name, value in state.items()}, dict(plain.state_dict()))


@pytest.mark.some(2)
@pytest.mark.parametrize("row", [0, 2, 3])
@pytest.mark.parametrize("kind", ["zero-2", "zero-3", "dcp"])
@on_ranks(2)
def test_training_goes_on_as_the_plain_optimizer_does(kind: str, row: int, tmp_path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        # Without the model: names are sorted out when they meet the engine's.
        WRITERS[kind](tmp_path / "theirs", *foreign.trained_model())
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    torch.distributed.barrier()
    resume(str(tmp_path / "ours"), row)


LAYOUTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tensor": lambda _: {"mesh": {"tensor": 2}},
    "host": lambda _: {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "nvme": lambda folder: {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
    },
    "both nvme": lambda folder: {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
            "offload_param": {"device": "nvme", "nvme_path": str(folder)},
        }
    },
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["zero-0", "zero-3", "universal", "dcp-flat"])
@on_ranks(4)
def test_states_are_loaded_as_they_were_in_any_layout(kind: str, layout: str, tmp_path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        model, optimizer = foreign.trained_model()
        WRITERS[kind](tmp_path / "theirs", model, optimizer)
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", model=model)
    torch.distributed.barrier()
    again = tmp_path / "again"
    resume(str(tmp_path / "ours"), 3, again, **LAYOUTS[layout](tmp_path))
    if torch.distributed.get_rank() == 0:
        found = {name: value for name, value in tensors(again / "global_step3").items() if "random/" not in name}
        assert_same(found, tensors(tmp_path / "ours" / "global_step3"))


@pytest.mark.full
@pytest.mark.parametrize("flatten", [False, True])
@on_ranks(2)
def test_files_of_fsdp2_have_the_values_that_it_holds(flatten: bool, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    model = foreign.Small()
    mesh = init_device_mesh("cpu", (2,))
    for module in (model.one, model.two, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(foreign.groups(model), lr=0.01)
    foreign.step(model, optimizer, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state, states = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": state, "optim": states, "step": 3}, checkpoint_id=tmp_path / "theirs")
    full = {f"parameter/{name}": p.full_tensor().detach() for name, p in model.named_parameters()}
    full |= {
        f"optimizer/{key}/{name}": optimizer.state[p][key].full_tensor()
        for name, p in model.named_parameters()
        for key in foreign.STATES
        if p in optimizer.state
    }
    if torch.distributed.get_rank() == 0:
        path = zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", model=foreign.Small())
        assert_same({n: v for n, v in tensors(path).items() if not n.startswith("buffer/")}, full)


def test_lightning_states_are_found_by_the_order_of_parameters(tmp_path: Path) -> None:
    model, optimizer = foreign.trained_model(Plain, single=True)
    foreign.write_lightning(tmp_path / "last.ckpt", model, optimizer)
    path = zeromesh.convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "ours", strip="net.")
    assert_same(tensors(path), foreign.everything(model, optimizer))
    assert whole_manifest(path)["scheduler"]["step_size"] == 2


@pytest.mark.full
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_files_of_the_real_lightning_have_the_values_that_it_holds(precision: str, ranks: int, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    script = ROOT / "tests" / "support" / "lightning_writer.py"
    command = [sys.executable, *torchrun, str(script), str(tmp_path), precision]
    done = run_command(command, timeout=240, PYTHONPATH=os.pathsep.join(FOLDERS), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    path = zeromesh.convert_checkpoint(
        tmp_path / "last.ckpt", tmp_path / "ours", strip="net.", model="foreign_checkpoints:Small"
    )
    assert_same(tensors(path), torch.load(tmp_path / "held.pt"))
    assert whole_manifest(path)["global_steps"] == 3


DATA = Path(__file__).parent / "data" / "recorded.zip"

RECORDED = ("deepspeed-0-bf16", "deepspeed-2-fp16", "deepspeed-3-bf16")


def recorded(kind: str, folder: Path) -> Any:
    """Unpack files that a real library wrote; return what it held, as it says itself."""
    with zipfile.ZipFile(DATA) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(f"{kind}/")])
    return torch.load(folder / kind / "held.pt")


@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_files_of_deepspeed_have_what_it_held(kind: str, tmp_path: Path) -> None:
    held = recorded(kind, tmp_path)
    path = zeromesh.convert_checkpoint(tmp_path / kind, tmp_path / "ours", model=foreign.Small())
    found = {name: value for name, value in tensors(path).items() if not name.startswith("buffer/")}
    assert_same(found, {name: value for name, value in held.items() if isinstance(value, torch.Tensor)})
    manifest, scale = whole_manifest(path), held["scale"]
    assert (manifest["global_steps"], manifest["scheduler_type"]) == (held["steps"], "WarmupLR")
    if "fp16" in kind:
        good = scale["cur_iter"] - scale["last_overflow_iter"] - 1
        assert (manifest["loss_scaler"]["scale"], manifest["loss_scaler"]["good_steps"]) == (scale["cur_scale"], good)
    else:
        assert manifest["loss_scaler"] is None


@pytest.mark.parametrize("kind", ["megatron-fp32", "megatron-bf16"])
def test_recorded_files_of_megatron_core_have_what_its_own_reader_finds(kind: str, tmp_path: Path) -> None:
    wanted: dict[str, torch.Tensor] = {}
    # Tensors of all layers, in their order, and fp32 masters in the place of parameters in 16 bits.
    for name, value in sorted(recorded(kind, tmp_path).items(), key=lambda item: "fp32_param" in item[0]):
        if isinstance(value, torch.Tensor):
            key, own = name.removeprefix("optimizer.state.").split(".", 1) if "optimizer." in name else ("", name)
            full = f"parameter/{own}" if key in ("", "fp32_param") else f"optimizer/{key}/{own}"
            layers = enumerate(value) if ".layers." in full else [(None, value)]
            wanted |= {
                full if number is None else full.replace(".layers.", f".layers.{number}."): layer
                for number, layer in layers
            }
    path = zeromesh.convert_checkpoint(tmp_path / kind, tmp_path / "ours")
    assert_same(tensors(path), wanted)
    manifest = whole_manifest(path)
    assert manifest["global_steps"] == 3
    assert {numbers["step"][0] for numbers in manifest["scalars"].values()} == {3.0}
    assert len(manifest["scalars"]) == sum(name.startswith("parameter/") for name in wanted)


def test_lightning_states_need_the_model_where_their_order_is_not_clear(tmp_path: Path) -> None:
    model, optimizer = foreign.trained_model(single=True)
    foreign.write_lightning(tmp_path / "last.ckpt", model, optimizer)
    with pytest.raises(ValueError, match="frozen or tied, .* pass --model"):
        zeromesh.convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "ours", strip="net.")
    path = zeromesh.convert_checkpoint(
        tmp_path / "last.ckpt", tmp_path / "ours", strip="net.", model="foreign_checkpoints:Small"
    )
    assert_same(tensors(path), foreign.everything(model, optimizer))


def test_groups_of_numbered_parameters_are_told_by_their_shapes(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = Plain()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)
    foreign.step(model, optimizer, 3)
    foreign.write_lightning(tmp_path / "last.ckpt", model, optimizer)
    # Both matrices have one shape, and lie in the order of the model.
    path = zeromesh.convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "ours", strip="net.")
    assert_same(tensors(path), foreign.everything(model, optimizer))
    assert whole_manifest(path)["members"] == {"embed.weight": 0, "head.weight": 0, "head.bias": 1}
    apart = torch.optim.AdamW([{"params": [p]} for p in (*matrices, *vectors)], lr=0.01)
    foreign.step(model, apart, 1)
    foreign.write_lightning(tmp_path / "apart.ckpt", model, apart)
    with pytest.raises(ValueError, match="or in which group; pass --model"):
        zeromesh.convert_checkpoint(tmp_path / "apart.ckpt", tmp_path / "none")


def test_megatron_tensors_of_all_layers_become_one_for_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers = torch.randn(3, 4, 2)
    foreign.write_megatron(tmp_path / "iter", layers)
    with caplog.at_level(logging.WARNING, "zeromesh"):
        path = zeromesh.convert_checkpoint(tmp_path / "iter", tmp_path / "ours", model=nn.Linear(2, 2))
    found = tensors(path)
    for number in range(3):
        assert torch.equal(found[f"parameter/decoder.layers.{number}.mlp.weight"], layers[number])
        assert torch.equal(found[f"optimizer/exp_avg/decoder.layers.{number}.mlp.weight"], layers[number] + 1)
    assert whole_manifest(path)["global_steps"] == 7
    assert "not in the model: decoder.layers.0.mlp.weight" in caplog.text
    assert "only in the model: weight, bias" in caplog.text


@pytest.fixture
def ours(tmp_path: Path) -> tuple[Path, Any, Any]:
    model, optimizer = foreign.trained_model()
    foreign.write_zero(tmp_path / "theirs", 2, 2, model, optimizer)
    zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    return tmp_path / "ours", model, optimizer


def test_a_plain_model_and_its_optimizer_load_what_is_exported_for_torch(ours: Any, tmp_path: Path) -> None:
    folder, model, optimizer = ours
    zeromesh.convert_checkpoint(folder, tmp_path / "dcp", "dcp")
    torch.manual_seed(1)
    again = foreign.Small()
    other = torch.optim.AdamW(foreign.groups(again), lr=0.5)
    foreign.step(again, other, 1)
    state, states = get_state_dict(again, other)
    held = {"model": state, "optimizer": states}
    dcp.load(held, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(again, other, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    assert_same(foreign.everything(again, other), foreign.everything(model, optimizer))
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]
    for run in ((model, optimizer), (again, other)):
        foreign.step(*run, 2, first=3)
    assert_same(foreign.everything(again, other), foreign.everything(model, optimizer))


@pytest.mark.parametrize("to", ["dcp", "deepspeed-universal"])
def test_what_is_exported_comes_back_as_it_was(to: str, ours: Any, tmp_path: Path) -> None:
    folder, model, optimizer = ours
    zeromesh.convert_checkpoint(folder, tmp_path / "there", to, ranks=2 if to == "deepspeed-universal" else 0)
    path = zeromesh.convert_checkpoint(tmp_path / "there", tmp_path / "back", model=model)
    assert_same(tensors(path), foreign.everything(model, optimizer))
    first, last = whole_manifest(folder / "global_step3"), whole_manifest(path)
    for key in ("global_steps", "groups", "members", "scheduler", "scalars"):
        assert last[key] == first[key], key


def test_files_of_ranks_are_for_deepspeed_alone(ours: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ranks = 2 is not for dcp: only deepspeed-universal has files of ranks"):
        zeromesh.convert_checkpoint(ours[0], tmp_path / "there", "dcp", ranks=2)


def test_the_loss_scale_goes_to_deepspeed_and_back(tmp_path: Path) -> None:
    held = recorded("deepspeed-2-fp16", tmp_path)
    first = zeromesh.convert_checkpoint(tmp_path / "deepspeed-2-fp16", tmp_path / "ours")
    zeromesh.convert_checkpoint(tmp_path / "ours", tmp_path / "there", "deepspeed-universal")
    path = zeromesh.convert_checkpoint(tmp_path / "there", tmp_path / "back")
    found = whole_manifest(path)["loss_scaler"]
    assert found == whole_manifest(first)["loss_scaler"]
    assert (found["scale"], found["window"]) == (held["scale"]["cur_scale"], 3)


def test_weights_alone_go_to_and_from_safetensors(ours: Any, tmp_path: Path) -> None:
    folder, model, _ = ours
    zeromesh.convert_checkpoint(folder, tmp_path / "hf", "hf")
    path = zeromesh.convert_checkpoint(tmp_path / "hf", tmp_path / "back", model=model)
    wanted = {name: value for name, value in foreign.everything(model, torch.optim.SGD(model.parameters())).items()}
    assert_same(tensors(path), wanted)
    with pytest.raises(FileExistsError, match="choose another folder"):
        zeromesh.convert_checkpoint(folder, tmp_path / "hf", "hf")


@on_ranks(2)
def test_groups_of_parameters_are_kept_by_name(tmp_path: Path) -> None:
    model = foreign.Small()
    optimizer = torch.optim.AdamW(foreign.groups(model), lr=0.01)
    engine = zeromesh.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 3}})[0]
    train_step(engine, engine(foreign.tokens(0)))
    path = engine.save_checkpoint(tmp_path)
    members = whole_manifest(path)["members"]
    assert members == {"embed.weight": 0, "one.weight": 0, "two.weight": 0, "one.bias": 1, "two.bias": 1}


FILES = {
    "zero-0": "global_step3/mp_rank_00_model_states.pt",
    "zero-1": "global_step3/*_optim_states.pt",
    "zero-2": "global_step3/mp_rank_00_model_states.pt",
    "zero-3": "global_step3/*0_mp_rank_00_model_states.pt",
    "universal": "global_step3/zero/one.weight/exp_avg.pt",
    "dcp": ".metadata",
    "lightning": "last.ckpt",
    "megatron": "common.pt",
}


def written(kind: str, folder: Path) -> Path:
    """Write a checkpoint of a format; return the file of it that ``FILES`` names."""
    folder.mkdir()
    if kind == "lightning":
        foreign.write_lightning(folder / "last.ckpt", *foreign.trained_model(Plain, single=True))
    elif kind == "megatron":
        foreign.write_megatron(folder, torch.ones(2, 2, 2))
    else:
        shutil.rmtree(folder)
        WRITERS[kind](folder, *foreign.trained_model())
    return next(iter(sorted(folder.glob(FILES[kind]))))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", FILES)
def test_code_in_a_file_is_refused_and_not_run(kind: str, zipped: bool, tmp_path: Path) -> None:
    file = written(kind, tmp_path / "theirs")
    buffer = io.BytesIO()
    if zipped and kind != "dcp":
        torch.save({"module": Malicious(tmp_path / "ran")}, buffer)
    else:
        pickle.dump(Malicious(tmp_path / "ran"), buffer, protocol=2)
    file.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"holds posix\.system, which is not a tensor") as caught:
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert str(file) in str(caught.value)
    assert "load it with that library" in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("left", ["half", "nothing", "other"])
@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_cut_off_or_of_another_format_is_named(kind: str, left: str, tmp_path: Path) -> None:
    file = written(kind, tmp_path / "theirs")
    content = {"half": file.read_bytes()[: file.stat().st_size // 2], "nothing": b"", "other": b"\x89HDF\r\n\x1a\n" * 9}
    file.write_bytes(content[left])
    with pytest.raises(ValueError, match="cut off.*copy it again") as caught:
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert str(file) in str(caught.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_that_are_not_contiguous_or_of_few_bits_keep_their_values(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randn(3, 5).to(dtype)
    torch.save({"state_dict": {"one": value.t(), "two": value[:, ::2]}, "global_step": 3}, tmp_path / "last.ckpt")
    found = tensors(zeromesh.convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "ours"))
    for name, wanted in {"one": value.t(), "two": value[:, ::2]}.items():
        assert found[f"parameter/{name}"].dtype == dtype
        assert torch.equal(found[f"parameter/{name}"].float(), wanted.float())


def test_a_size_that_no_disk_has_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    torch.save({"state_dict": {"one": torch.zeros(1).expand(1 << 50)}}, tmp_path / "last.ckpt")
    with pytest.raises(OSError, match="a checkpoint needs 4,503,599,627,370,496 bytes"):
        zeromesh.convert_checkpoint(tmp_path / "last.ckpt", tmp_path / "ours")


def test_data_of_a_distributed_checkpoint_that_are_cut_off_or_elsewhere_are_named(tmp_path: Path) -> None:
    written("dcp", tmp_path / "theirs")
    data = next((tmp_path / "theirs").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:2000])
    with pytest.raises(ValueError, match=f"{data} is cut off after 2,000 bytes"):
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    data.unlink()
    with pytest.raises(ValueError, match="__0_0.distcp, which is not in"):
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")


def changed(file: Path, old: bytes, new: bytes) -> None:
    """Put other bytes of the same length into the files of a zip file."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    assert any(old in content for content in entries.values())
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content.replace(old, new))


@pytest.mark.parametrize("kind", ["zero-1", "zero-2"])
def test_files_of_older_versions_which_do_not_say_where_parameters_lie_are_read(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path / "theirs")
    for file in (tmp_path / "theirs").rglob("*optim_states.pt"):
        changed(file, b"param_slice_mappings", b"another_entry_of_it_")
    model, optimizer = foreign.trained_model()
    path = zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", model=model)
    assert_same(tensors(path), foreign.everything(model, optimizer))


@pytest.mark.parametrize("kind", ["zero-1", "zero-3"])
def test_files_of_several_checkpoints_are_not_mixed(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path / "theirs")
    model, optimizer = foreign.trained_model()
    foreign.step(model, optimizer, 1, first=3)
    WRITERS[kind](tmp_path / "later", model, optimizer)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "later" / "global_step3" / name, tmp_path / "theirs" / "global_step3" / name)
    with pytest.raises(ValueError, match=r"mixes files of several checkpoints: the steps .* are 3\.0, 4\.0; copy all"):
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")


def test_the_model_file_of_a_sharded_checkpoint_is_none_of_stage_0(tmp_path: Path) -> None:
    written("zero-1", tmp_path / "theirs")
    for file in (tmp_path / "theirs").rglob("*optim_states.pt"):
        file.unlink()
    with pytest.raises(ValueError, match="no file beside it ends in optim_states.pt; copy those"):
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")


def test_a_checkpoint_that_lacks_a_rank_is_refused(tmp_path: Path) -> None:
    file = written("zero-1", tmp_path / "theirs")
    file.unlink()
    with pytest.raises(ValueError, match="of 1 of 2 ranks; copy the others, too"):
        zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")


def test_the_command_tells_unknown_folders_from_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    failed = call("convert", tmp_path / "none", tmp_path / "ours")
    assert failed.exit_code == 2
    for pattern in (".metadata", "*zero_pp_rank_*_optim_states.pt", "zero/optimizer_state.pt", "*.ckpt", "common.pt"):
        assert pattern in failed.output
    written("zero-3", tmp_path / "theirs")
    done = call("convert", tmp_path / "theirs", tmp_path / "ours")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "ours" / "latest").read_text() == "global_step3"


@pytest.mark.parametrize("kind", ["zero-2", "dcp"])
@on_ranks(1)
def test_an_engine_names_the_command_for_a_checkpoint_of_another_library(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path / "theirs")
    engine = start_engine(foreign.Small(), optimizer={"type": "AdamW"})
    with pytest.raises(ValueError, match="run `zeromesh convert .*theirs FOLDER` first"):
        engine.load_checkpoint(tmp_path / "theirs")


@on_ranks(1)
def test_weights_beside_the_checkpoints_of_a_run_are_no_checkpoint(tmp_path: Path) -> None:
    engine = start_engine(foreign.Small(), optimizer={"type": "AdamW"})
    engine.save_16bit_model(tmp_path / "run")
    assert engine.load_checkpoint(tmp_path / "run") == (None, {})
    path = engine.save_checkpoint(tmp_path / "run")
    assert engine.load_checkpoint(tmp_path / "run")[0] == str(path)
    assert zeromesh.convert_checkpoint(tmp_path / "run", tmp_path / "again").name == path.name


@on_ranks(1)
def test_states_of_another_kind_of_optimizer_are_refused(tmp_path: Path) -> None:
    written("zero-2", tmp_path / "theirs")
    zeromesh.convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    model = foreign.Small()
    optimizer = torch.optim.SGD(foreign.groups(model), lr=0.1)
    engine = zeromesh.initialize(model=model, optimizer=optimizer, config={})[0]
    with pytest.raises(ValueError, match="is of Adam or AdamW"):
        engine.load_checkpoint(tmp_path / "ours")
