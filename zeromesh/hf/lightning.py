"""Strategy for Lightning: ``Trainer(strategy=zeromesh.hf.lightning.Strategy("config.json"))``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh import deepspeed
from zeromesh.config.trainers import allows_untested, copies_in, for_trainer, require_lightning
from zeromesh.shard.optim.factory import check_users

deepspeed.install()  # the class below asks for it

from lightning.fabric.utilities.seed import reset_seed  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy  # noqa: E402


class Strategy(DeepSpeedStrategy):  # Lightning has no types here
    """Lightning's strategy for DeepSpeed on any device, with a ZeroMesh configuration.

    Args:
        config: path of a JSON file, or a dict of the same form. The micro-batch is the data loader's, accumulation and
            clipping are the trainer's.
        options: of ``lightning.pytorch.strategies.DeepSpeedStrategy``.

    Raises:
        ConfigError: the configuration is wrong, or asks for what a trainer cannot do.
    """

    def __init__(self, config: str | Path | Mapping[str, Any], **options: Any) -> None:
        document = for_trainer(config, "lightning")
        self._copies, self._checks = copies_in(document), not allows_untested(config)
        super().__init__(config=document, **options)

    def setup(self, trainer: Any) -> None:
        """Make the engine; raise ValueError if the trainer's arguments contradict the configuration."""
        require_lightning(self.config or {}, trainer.gradient_clip_val, self.precision_plugin.precision)
        super().setup(trainer)

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        if optimizer is not None and self._checks:
            assert self.config is not None
            check_users(optimizer, set(model.parameters()), sharded=self.config["zero_optimization"]["stage"] > 0)
        return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def setup_environment(self) -> None:
        """Set up devices and ranks, and start the process group; unlike Lightning's, also without a GPU."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Start the process group. A processor has no index that Lightning could compare."""
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Build modules without memory at stage 3; ``from_pretrained`` of transformers reads files on one rank."""
        hf_config = None
        if self.zero_stage_3 and find_spec("transformers") is not None:
            from transformers.integrations.deepspeed import HfDeepSpeedConfig

            # transformers finds the configuration as long as this name holds it.
            hf_config = HfDeepSpeedConfig(self.config)  # type: ignore[no-untyped-call]
        with super().model_sharded_context():
            yield
        del hf_config

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients. Lightning has divided the loss by the accumulated batches, so the engine must not."""
        loss: torch.Tensor = super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
        return loss

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine writes the weights of a checkpoint, each rank its own."""
        return {}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """This rank's share of the data: ranks of one tensor or context group get the same one."""
        return {"num_replicas": self.world_size // self._copies, "rank": self.global_rank // self._copies}
