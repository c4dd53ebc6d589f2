"""Curricula over the length of samples: the schedules, what is cut, and training beside plain torch that cuts."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeromesh
from zeromesh import Settings
from zeromesh.config.errors import ConfigError
from zeromesh.engine.curriculum import LengthCurriculum, length_at

pytestmark = pytest.mark.usefixtures("one_rank")

LINEAR = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 4, "max_difficulty": 16,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
}  # fmt: skip
ROOT = LINEAR | {
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4, "root_degree": 2},
}
DISCRETE = {
    "enabled": True, "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [4, 8, 16], "max_step": [1, 3]},
}  # fmt: skip
EFFICIENCY = {
    "enabled": True,
    "data_routing": {"enabled": False, "random_ltd": {"enabled": False, "total_layer_num": 24}},
    "data_sampling": {
        "enabled": True,
        "curriculum_learning": {
            "enabled": True,
            "curriculum_metrics": {
                "seqlen": {"difficulty_type": "value", "clustering_type": "single_cluster"}
                | {key: value for key, value in ROOT.items() if key not in ("enabled", "curriculum_type")}
            },
        },
    },
}


def loaded(document: dict[str, Any]) -> Any:
    return Settings.load(document).curriculum_learning


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        # 4 + share x 12, rounded down to a multiple of 4, and 16 at the most.
        (LINEAR, [4, 8, 12, 16, 16]),
        (ROOT, [8, 12, 12, 16, 16]),  # shares 0.5, 0.707, 0.866, 1, 1.118
        (DISCRETE, [4, 8, 8, 16, 16]),
    ],
)
def test_lengths_follow_the_documented_formula(section: dict[str, Any], expected: list[int]) -> None:
    settings = loaded({"curriculum_learning": section})
    assert [length_at(settings, update) for update in range(1, 6)] == expected


def test_the_curriculum_of_data_efficiency_is_the_same_one() -> None:
    assert loaded({"data_efficiency": EFFICIENCY}) == loaded({"curriculum_learning": ROOT})


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"curriculum_learning": LINEAR | {"curriculum_type": "vocabulary"}}, 'must be "seqlen"'),
        ({"curriculum_learning": LINEAR | {"schedule_type": "custom"}}, "use fixed_discrete"),
        ({"curriculum_learning": LINEAR | {"schedule_config": {}}}, "schedule_config.total_curriculum_step must be"),
        ({"curriculum_learning": LINEAR | {"min_difficulty": 2}}, "rounded down to 0 tokens"),
        ({"curriculum_learning": LINEAR | {"min_difficulty": 32}}, "max_difficulty = 16 is below min_difficulty = 32"),
        (
            {"curriculum_learning": DISCRETE | {"schedule_config": {"difficulty": [1], "max_step": [1]}}},
            "one entry more",
        ),
        ({"curriculum_learning": LINEAR, "mesh": {"pipeline": 2}}, "set mesh.pipeline to 1"),
        (
            {"data_efficiency": EFFICIENCY | {"data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}},
            "random-LTD, which drops tokens in layers, is not available",
        ),
        (
            {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}},
            "choosing samples by difficulty is not available",
        ),
    ],
)
def test_what_is_not_built_or_incomplete_is_refused_by_name(document: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load(document)
    assert len(caught.value.problems) == 1
    assert expected in caught.value.problems[0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        # Sums over all tokens before each: every token counts in the loss.
        logits = self.head(self.table(ids).cumsum(1))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Asking(Words):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor, curriculum_seqlen: int) -> torch.Tensor:  # type: ignore[override]
        assert ids.shape[1] == 16
        return super().forward(ids[:, :curriculum_seqlen], labels[:, :curriculum_seqlen])


CONFIG = {
    "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "curriculum_learning": LINEAR,
}  # fmt: skip


def plain(model: nn.Module, batches: list[torch.Tensor], lengths: list[int]) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(batches):
        cut = batch[:, : lengths[number // 2]]
        logits = Words.forward(model, cut)
        (F.cross_entropy(logits.flatten(0, 1), cut.flatten()) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_training_equals_plain_torch_that_cuts_by_the_formula(tmp_path: Any) -> None:
    torch.manual_seed(0)
    start = Words()
    batches = [torch.randint(11, (3, 16)) for _ in range(10)]
    expected = plain(start, batches, [4, 8, 12, 16, 16])
    cases: dict[type[Words], Any] = {Words: "step", Asking: "step", nn.Module: "train_batch"}
    for kind, way in cases.items():
        model = copy.deepcopy(start)
        if kind is Asking:
            model.__class__ = Asking
        loss_fn = None if way == "step" else lambda out, labels: F.cross_entropy(out.flatten(0, 1), labels.flatten())
        engine = zeromesh.initialize(model=model, config=CONFIG, loss_fn=loss_fn)[0]
        assert engine.curriculum_enabled_legacy()
        for number in range(0, 10, 2):
            assert engine.curriculum_scheduler_legacy.get_current_difficulty() == [4, 8, 12, 16, 16][number // 2]
            if way == "train_batch":
                engine.train_batch(iter([(batch, batch) for batch in batches[number : number + 2]]))
                continue
            for batch in batches[number : number + 2]:
                engine.backward(engine(batch, labels=batch))
                engine.step()
            if number == 2 and kind is Words:  # a resumed run goes on with the length of its update
                engine.save_checkpoint(str(tmp_path))
                engine.load_checkpoint(str(tmp_path))
        for own, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(own, theirs)
        engine.destroy()


def test_evaluation_sees_whole_samples() -> None:
    engine = zeromesh.initialize(model=Words(), config=CONFIG)[0]
    ids = torch.zeros(3, 16, dtype=torch.long)
    assert engine(ids).shape[1] == 4
    assert engine.eval()(ids).shape[1] == 16


def test_every_sequence_of_a_batch_is_cut_and_nothing_else() -> None:
    cut = LengthCurriculum(loaded({"curriculum_learning": LINEAR}), Words()).cut
    batch = {
        "ids": torch.zeros(3, 16), "mask": torch.zeros(3, 1, 16, 16), "embedded": torch.zeros(3, 16, 16),
        "label": torch.zeros(3), "image": torch.zeros(3, 5),
    }  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in cut(batch).items()}
    assert shapes == {"ids": (3, 4), "mask": (3, 1, 4, 4), "embedded": (3, 4, 16), "label": (3,), "image": (3, 5)}
