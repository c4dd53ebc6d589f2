"""``zeromesh.verify``: what it compares, leaves alone and refuses."""

import json
import random
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from commands import call
from harness import on_ranks
from verifying import Net, net_and_batch
from zeromesh import Settings
from zeromesh.apps.verify.plain_training import PlainStep
from zeromesh.apps.verify.ranks import Finding
from zeromesh.apps.verify.rows import SampleRows
from zeromesh.apps.verify.small_layout import small_layout
from zeromesh.apps.verify.verification_report import Report, TrialReport, Verdict

CONFIG: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "train_micro_batch_size_per_gpu": 2,
}
FOUND = Finding(1, "master", "weight", 0, "data 0", 1e-9, 1e-8, 1.0)


@pytest.mark.parametrize("wrong", [nan, inf])
def test_numbers_that_are_not_finite_are_never_equal(wrong: float) -> None:
    assert FOUND.equal
    assert not replace(FOUND, difference=wrong).equal
    assert not replace(FOUND, bound=wrong).equal


def test_every_share_and_micro_batch_has_its_own_samples() -> None:
    ids = torch.arange(3, 35).view(2, 16)
    batch = {"ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100), "mask": torch.ones(2, 16), "size": 3}
    rows = SampleRows(batch, 2, ids=20)
    drawn = [rows.at(*place) for place in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    for number, one in enumerate(drawn):
        assert not any(torch.equal(one["ids"], other["ids"]) for other in drawn[:number])
        assert int(one["ids"].max()) < 20
        assert torch.equal(one["mask"], batch["mask"])
        assert one["size"] == 3
        # Labels that do not count are as many as in rows of the batch.
        assert set((one["labels"] == -100).sum(1).tolist()) <= set((batch["labels"] == -100).sum(1).tolist())
    assert torch.equal(rows.at(0, 0, 0)["ids"], drawn[0]["ids"])


@on_ranks(2)
def test_the_users_model_and_generators_stay_as_they_were() -> None:
    model, batch = net_and_batch()
    model.second.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    report = zeromesh.verify(model, CONFIG, batch, steps=1)
    assert report.equal, report.sentence
    assert "dropout 0" in report.changes
    assert (torch.rand(1), random.random()) == (torch.manual_seed(5) and torch.rand(1), random.Random(5).random())
    assert model.first[3].p == 0.1
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())


class Overflowing(nn.Module):
    """The gradient is beyond fp16 at every loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x).float() * 1e6).mean()


class Drawing(nn.Module):
    """Adds noise that is no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * torch.rand(1, dtype=x.dtype)).mean()


@on_ranks(2)
def test_what_cannot_be_compared_is_not_called_equal() -> None:
    batch = {"x": torch.rand(2, 4)}
    report = zeromesh.verify(Overflowing(), {**CONFIG, "fp16": {"enabled": True}}, batch)
    assert report.verdict is Verdict.UNVERIFIED
    assert "overflowed at every loss scale" in report.reason
    report = zeromesh.verify(Drawing(), CONFIG, batch)
    assert report.verdict is Verdict.UNVERIFIED
    assert "draws random numbers" in report.reason
    # Equal samples would hide that a rank's gradients are those of another.
    report = zeromesh.verify(nn.Sequential(nn.Linear(4, 1), Mean()), CONFIG, {"input": torch.ones(2, 4)})
    assert report.verdict is Verdict.UNVERIFIED
    assert "the same gradients" in report.reason


class Mean(nn.Module):
    """The mean of all, with a mask of infinities, which are equal on both sides."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.mark.full
def test_one_rank_is_another_process() -> None:
    model, initialized = nn.Sequential(nn.Linear(4, 1), Mean()), torch.distributed.is_initialized()
    report = zeromesh.verify(model, CONFIG, {"input": torch.rand(2, 4)}, steps=1, ranks=1)
    assert report.equal, report.sentence
    assert any(one.kind == "buffer" for trial in report.trials for one in trial.findings)
    assert torch.distributed.is_initialized() is initialized  # an earlier test may have left a group of one


def test_values_that_no_rank_has_compared_are_missing() -> None:
    step = PlainStep({f"{kind}/weight": torch.ones(2) for kind in ("gradient", "master")})
    assert TrialReport("float64", "float64", [FOUND]).missing([step]) == {
        "gradient": ["weight"], "parameter": ["weight"],
    }  # fmt: skip


def failing() -> None:
    raise LookupError("no data")


def test_an_error_of_the_users_function_has_not_the_status_of_a_difference(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    result = call("verify", file, "test_verify:failing")
    assert result.exit_code == 2
    assert "LookupError: no data" in result.output


@on_ranks(2)
def test_a_batch_that_the_model_refuses_is_an_error_on_every_rank() -> None:
    with pytest.raises(ValueError, match="refuses the batch of float32"):
        zeromesh.verify(Net(), CONFIG, {"images": torch.ones(2, 5, 8, 8), "labels": torch.tensor([1, 2])})


def layout(**changes: Any) -> Any:
    return small_layout(Settings.load({**CONFIG, **changes}), None)


def test_a_mesh_becomes_as_small_as_it_can() -> None:
    assert layout().sizes["data"] == 2
    assert layout(mesh={"tensor": 2, "pipeline": 2}).ranks == 8
    assert layout(mesh={"data": 3}).sizes["data"] == 3
    assert layout(mesh={"data": 1}).ranks == 2
    found = layout(train_batch_size=512, train_micro_batch_size_per_gpu=8)
    assert (found.micro_batches, found.rows) == (4, 2)
    assert "gradient_accumulation_steps 32 -> 4" in found.changes


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="has no optimizer"):
        small_layout(Settings.load({}), None)
    with pytest.raises(ValueError, match=r"32 ranks, more than 16.*--ranks 8"):
        layout(mesh={"data": 8, "tensor": 4})
    found = small_layout(Settings.load({**CONFIG, "mesh": {"data": 8, "tensor": 4}}), 8)
    assert (found.sizes["data"], found.sizes["tensor"]) == (2, 4)
    with pytest.raises(ValueError, match="no batch for Net"):
        zeromesh.verify(Net(), CONFIG)
    model, batch = net_and_batch()
    with pytest.raises(ValueError, match=r"of Net is on the meta device, without a value; build .*zero.Init"):
        zeromesh.verify(model.to("meta"), CONFIG, batch)


@pytest.mark.parametrize(
    ("model", "said"),
    [("nothing.there:model", "cannot be imported"), ("verifying:Net.forward.none", "cannot be imported"),
     ("no-such-folder", "not a folder")],
)  # fmt: skip
def test_an_unknown_model_is_an_error_of_the_command(model: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    result = call("verify", file, model)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_report_is_json_and_a_picture(tmp_path: Path) -> None:
    apart = replace(FOUND, difference=inf, cause="it is not there")
    trial = TrialReport("float64", "float64", [FOUND, apart])
    report = Report(Verdict.APART, "Net", "data 2", 1, trials=[trial], ranks=[0], place="rank 0 (data 0)")
    text = json.dumps(report.as_dict(), allow_nan=False)
    assert json.loads(text)["first"]["cause"] == "it is not there"
    file = tmp_path / "differences.png"
    report.draw(file)
    assert file.read_bytes().startswith(b"\x89PNG")
    report.draw(file.with_suffix(".html"))
    assert "largest relative differences in float64" in file.with_suffix(".html").read_text()


class Dying(Net):
    """Ends the second rank in its first forward there."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        import os

        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), 9)
        return super().forward(images, labels)


def dying() -> tuple[nn.Module, Any]:
    return Dying(), net_and_batch()[1]


@pytest.mark.parametrize(("verdict", "trains"), [(Verdict.EQUAL, True), (Verdict.APART, False)])
def test_training_begins_only_after_an_equal_comparison(
    verdict: Verdict, trains: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    called: list[Any] = []
    monkeypatch.setattr("zeromesh.apps.cli.verify.run", lambda *arguments: called.append(arguments) or verdict)
    monkeypatch.setattr("zeromesh.apps.train.train_run.train", lambda *_: called.append("trained"))
    result = call("train", file, "--verify", "--set", "run.steps=2")
    assert result.exit_code == verdict.value, result.output
    assert called[0][2] == ["run.steps=2"]
    assert ("trained" in called) is trains


@pytest.mark.full
@pytest.mark.usefixtures("no_group")
def test_a_rank_that_dies_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    result = call("verify", file, "test_verify:dying", "--json")
    assert result.exit_code == 2
    assert "rank 1 failed: killed by SIGKILL" in result.output


@pytest.mark.full
@pytest.mark.usefixtures("no_group")
def test_the_command_compares_a_model_and_its_batch(tmp_path: Path) -> None:
    file, picture = tmp_path / "config.json", tmp_path / "picture.png"
    file.write_text(json.dumps(CONFIG))
    result = call("verify", file, "verifying:net_and_batch", "--picture", picture)
    assert result.exit_code == 0, result.output
    assert "equal: data 2 trains Net as one plain process does" in " ".join(result.output.split())
    assert picture.exists()


@pytest.mark.full
def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    result = call("verify", file, "verifying:net_and_batch", "--steps", "200", "--timeout", "1")
    assert result.exit_code == 2
    assert "did not end within 1 s" in " ".join(result.output.split())
