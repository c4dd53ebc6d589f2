"""Lightning's ``validate``, ``test`` and ``predict`` equal those by itself: an engine without an optimizer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from hf_training import fresh_libraries, ranks

if find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

ROWS = torch.arange(64.0).view(8, 8) / 64
OFFLOADS = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def evaluated(folder: Path, zero: dict[str, Any] | None, calls: tuple[str, ...]) -> list[float]:
    """Return the values that the calls of a trainer give."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from torch import nn

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("value", self.net(batch).square().mean(), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    with fresh_libraries():
        chosen: dict[str, Any] = {"plugins": [LightningEnvironment()]}
        if zero is not None:
            from zeromesh.hf.lightning import Strategy

            chosen |= {"strategy": Strategy({"zero_optimization": zero}), "devices": ranks()}
        quiet = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(default_root_dir=folder, max_epochs=1, num_sanity_val_steps=0, **quiet, **chosen)
        module, found = Module(), []
        for call in calls:
            # One batch for all updates, so that a rank's share of the rows does not matter.
            rows = ROWS[:1].repeat(8, 1) if call == "fit" else ROWS
            loader = torch.utils.data.DataLoader(rows, batch_size=4 // ranks())
            given = getattr(trainer, call)(module, loader)
            if call == "predict":
                outputs = torch.cat(given)
                if "fit" not in calls:
                    torch.testing.assert_close(outputs, Module().net(ROWS[trainer.global_rank :: ranks()]))
                found.append(len(outputs) * ranks())
            elif call != "fit":
                found.append(float(trainer.callback_metrics["value"]))
    return found


@pytest.mark.full
@pytest.mark.parametrize("calls", [("validate", "test", "predict"), ("fit", "test"), ("validate", "fit", "predict")])
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lightning_evaluates_as_by_itself(stage: int, offloads: bool, calls: tuple[str, ...], tmp_path: Path) -> None:
    offload = OFFLOADS if stage == 3 else {"offload_optimizer": {"device": "cpu"}}
    zero = {"stage": stage, **(offload if offloads else {})}
    wanted = evaluated(tmp_path, None, calls)
    for found in run_ranks(evaluated, 2, tmp_path, zero, calls, timeout=300):
        assert found == pytest.approx(wanted, rel=1e-5)
