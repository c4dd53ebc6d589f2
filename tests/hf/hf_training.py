"""Short trainings by other libraries, each as its users write it; one process without ZeroMesh is the reference.

Each takes a folder and the configuration, or None for the plain library, and returns its losses and final weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Result = tuple[list[float], dict[str, torch.Tensor]]
Config = Mapping[str, Any] | None

TOKENS = 64
BATCH = 4
RATE = 1e-2
# With the usual eps, Adam would make a whole step of the rounding of a gradient that is zero.
EPS = 1e-4


def stage(number: int, **more: Any) -> dict[str, Any]:
    """Return a configuration as it is written for transformers and Accelerate."""
    zero = {"stage": number, "stage3_gather_16bit_weights_on_model_save": True}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    return {"zero_optimization": zero, **dict.fromkeys(auto, "auto"), "bf16": {"enabled": "auto"}, **more}


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def model(width: int = 32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, num_key_value_heads=2, **sizes, **ends))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(TOKENS - 4))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **ends)


def text(length: int, seed: int) -> str:
    numbers = torch.randint(TOKENS - 4, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


def samples(count: int, seed: int = 1, ignored: int = 0) -> list[dict[str, torch.Tensor]]:
    """Sequences; every third has so many tokens without labels, so that the mean over samples is none over tokens."""
    made = torch.randint(TOKENS, (count, 16), generator=torch.Generator().manual_seed(seed))
    labels = made.clone()
    labels[::3, :ignored] = -100
    return [{"input_ids": row, "labels": learned} for row, learned in zip(made, labels, strict=True)]


def arguments(config: Config, **more: Any) -> dict[str, Any]:
    """Arguments that all trainers of transformers and TRL share."""
    plain = {"learning_rate": RATE, "adam_epsilon": EPS, "max_steps": 4, "logging_steps": 1, "seed": 3}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    sizes = {"per_device_train_batch_size": BATCH // ranks(), "dataloader_pin_memory": False}
    return {**plain, **quiet, **sizes, "deepspeed": None if config is None else dict(config), **more}


def outcome(trainer: Any, folder: Path) -> Result:
    """Losses that a trainer logged, and the weights that it saved."""
    trainer.save_model(str(folder / "final"))
    if dist.is_initialized():
        dist.barrier()
    names = ("loss", "eval_loss", "eval_spread", "grad_norm")
    return [row[name] for row in trainer.state.log_history for name in names if name in row], saved(folder / "final")


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def transformers_trainer(folder: Path, config: Config, resume: Path | None = None, **more: Any) -> Result:
    """Train with evaluation, saving, the best model, accumulation, clipping and a schedule of transformers."""
    from transformers import Trainer, TrainingArguments

    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    rates = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.5}
    sizes = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2, "load_best_model_at_end": True}
    args = TrainingArguments(str(folder), **arguments(config, **often, **rates, **sizes, **more))
    trainer = Trainer(model(), args, train_dataset=samples(64, ignored=5), eval_dataset=samples(8, 2))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return outcome(trainer, folder)


def transformers_epochs(folder: Path, config: Config) -> Result:
    """Two epochs of five micro-batches; the last update of each has one instead of two."""
    from transformers import Trainer, TrainingArguments

    length = {"num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    args = TrainingArguments(str(folder), **arguments(config, **length))
    trainer = Trainer(model(), args, train_dataset=samples(5 * BATCH, ignored=5))
    trainer.train()
    assert trainer.state.global_step == 6
    return outcome(trainer, folder)


def accelerate_loop(folder: Path, config: Config, quantize: bool = False) -> Result:
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    # Accelerate clips under DeepSpeed as the configuration says.
    plugin = None if config is None else DeepSpeedPlugin(hf_ds_config={**config, "gradient_clipping": 0.5})
    loading = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, dataloader_config=loading)
    net = adapted(quantized(folder.parent)) if quantize else model()
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, eps=EPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(samples(32), batch_size=BATCH)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
    if not quantize:  # Accelerate itself cannot load the scales of a plain model in 4 bits
        accelerator.save_state(str(folder / "state"))
        with torch.no_grad():
            accelerator.load_state(str(folder / "state"))
    state = accelerator.get_state_dict(net)
    chosen = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save, "state_dict": state}
    accelerator.unwrap_model(net).save_pretrained(folder / "final", **chosen)
    accelerator.wait_for_everyone()
    return losses, saved(folder / "final")


def adapted(base: Any = None) -> Any:
    from peft import LoraConfig, get_peft_model

    base = base or model()
    torch.manual_seed(1)
    made = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # at zero, those of the other factor have no gradient
            nn.init.normal_(parameter, std=0.1)
    return made


def peft_adapters(folder: Path, config: Config) -> Result:
    """Adapters of PEFT, with checkpoints of a model that is mostly frozen."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(str(folder), **arguments(config, save_strategy="steps", save_steps=2))
    trainer = Trainer(adapted(), args, train_dataset=samples(32))
    trainer.train()
    return outcome(trainer, folder)


def by_mixin(kind: Any, config: Config, mixin: bool, **more: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return a trainer's class, shared arguments and more: the configuration is ``deepspeed``'s, or the mixin's."""
    if not mixin or config is None:
        return kind, arguments(config, **more), {}
    import zeromesh.hf

    mixed = type(f"Mixed{kind.__name__}", (zeromesh.hf.TrainerMixin, kind), {})
    return (
        mixed,
        arguments(None, use_cpu=True, **more),
        {"zeromesh": {"zero_optimization": config["zero_optimization"]}},
    )


def quantized(start: Path) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    code = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    chosen = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **code), "dtype": torch.float32}
    base = AutoModelForCausalLM.from_pretrained(start, **chosen)
    for layer in base.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):  # or the plain run would be evaluated in bf16
            layer.support_avx512bf16_for_cpu = False
    return base


def quantized_base(folder: Path, config: Config, way: str = "late") -> Result:
    """Adapters on 4 bits, and their evaluation. ``late``: transformers loads the base while ZeRO is in force."""
    from transformers import Trainer, TrainingArguments

    base = quantized(folder.parent) if way == "early" else None
    kind, shared, chosen = by_mixin(Trainer, config, way == "mixin", save_strategy="steps", save_steps=2)
    args = TrainingArguments(str(folder), **shared)
    data = {"train_dataset": samples(32), "eval_dataset": samples(8, 2)}
    trainer = kind(adapted(base or quantized(folder.parent)), args, **data, **chosen)
    trainer.train()
    trainer.evaluate()
    return outcome(trainer, folder)


def quantized_sft(folder: Path, config: Config, mixin: bool = False, wide: bool = True) -> Result:
    """Adapters that TRL adds by itself to a base in 4 bits, made ``wide`` again: TRL trains such in bf16."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    train, values = (
        Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows])
        for rows in (samples(32), samples(8, 2))
    )
    kind, shared, chosen = by_mixin(SFTTrainer, config, mixin)
    args = SFTConfig(str(folder), max_length=32, **shared)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    chosen |= {"train_dataset": train, "eval_dataset": values, "processing_class": tokenizer()}
    base = quantized(folder.parent)
    torch.manual_seed(1)
    trainer = kind(base, args, peft_config=adapters, **chosen)
    for parameter in trainer.model.parameters() if wide else ():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trainer.train()
    trainer.evaluate()
    return outcome(trainer, folder)


def trl_sft(folder: Path, config: Config, mixin: bool = False) -> Result:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": text(12, number)} for number in range(16)])
    kind, shared, chosen = by_mixin(SFTTrainer, config, mixin)
    args = SFTConfig(str(folder), max_length=32, **shared)
    trainer = kind(model(), args, train_dataset=rows, processing_class=tokenizer(), **chosen)
    trainer.train()
    return outcome(trainer, folder)


def trl_dpo(folder: Path, config: Config, mixin: bool = False) -> Result:
    """Train with a reference model of its own, which takes part of the weights every second update."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": text(4, n), "chosen": text(5, 100 + n), "rejected": text(5, 200 + n)} for n in range(16)]
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 2}
    kind, shared, chosen = by_mixin(DPOTrainer, config, mixin)
    args = DPOConfig(str(folder), max_length=32, **synced, **shared)
    chosen |= {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    trainer = kind(model(), model(), args, **chosen)
    trainer.train()
    return outcome(trainer, folder)


def trl_grpo(folder: Path, config: Config, mixin: bool = False, **more: Any) -> Result:
    """Generate on gathered weights; ranks draw the same numbers with and without ZeroMesh."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    start = folder.parent / f"start{config is None}"
    if dist.get_rank() == 0:
        model().save_pretrained(start)
    dist.barrier()
    rows = Dataset.from_list([{"prompt": text(4, number)} for number in range(16)])
    synced = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
    short = {"num_generations": 2, "max_completion_length": 6}
    kind, shared, chosen = by_mixin(GRPOTrainer, config, mixin, max_steps=3, **more)
    args = GRPOConfig(str(folder), **synced, **short, **shared)
    chosen |= {"train_dataset": rows, "processing_class": tokenizer()}
    trainer = kind(str(start), reward, args, **chosen)
    trainer.train()
    return outcome(trainer, folder)


def lightning_module(
    folder: Path,
    config: Config,
    epochs: int = 1,
    resume: Path | None = None,
    said: Mapping[str, Any] | None = None,
    sgd: bool = False,
) -> Result:
    """Train with accumulation, clipping and validation; ``said`` is in the configuration of the strategy, too."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.inner(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("value", self.inner(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if sgd:
                return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            return torch.optim.AdamW(self.parameters(), lr=RATE, eps=EPS)

    # Named, because Lightning asks MPI for the ranks otherwise, and an earlier test of this process may have ended MPI.
    chosen: dict[str, Any] = {"plugins": [LightningEnvironment()]}
    if config is not None:
        from zeromesh.hf.lightning import Strategy

        document = {"zero_optimization": config["zero_optimization"], **(said or {})}
        chosen |= {"strategy": Strategy(document), "devices": ranks()}
    module = Module()
    short = {"max_epochs": epochs, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "accelerator": "cpu"}
    quiet = {"enable_progress_bar": False, "logger": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(default_root_dir=folder, **short, **quiet, **chosen)
    # In order, where Lightning's own sampler would shuffle.
    rank = dist.get_rank() if dist.is_initialized() else 0
    train, values = samples(24)[rank :: ranks()], samples(8, 2)[rank :: ranks()]
    loaders = DataLoader(train, batch_size=BATCH // ranks()), DataLoader(values, batch_size=2)
    trainer.fit(module, *loaders, ckpt_path=None if resume is None else str(resume))
    trainer.save_checkpoint(folder / "checkpoint")
    losses = torch.tensor(module.losses)
    if config is None:
        return [*losses.tolist(), float(trainer.callback_metrics["value"])], module.state_dict()
    dist.all_reduce(losses)
    weights = trainer.strategy.model.gathered_state_dict()
    return [*(losses / ranks()).tolist(), float(trainer.callback_metrics["value"])], weights


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    learned = labels[..., 1:].flatten()
    return nn.functional.cross_entropy(outputs.logits[..., :-1, :].flatten(0, 1), learned)


def own_trainer(folder: Path, config: Config, batch: int = BATCH, own_loss: bool = False, **more: Any) -> Result:
    """``zeromesh.hf.Trainer``: no word of DeepSpeed, and as many samples per rank as there are shares of the data."""
    import transformers

    import zeromesh.hf

    sizes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": batch, "per_device_eval_batch_size": 2}
    often = {"eval_strategy": "steps", "eval_steps": 2, "use_cpu": True, "max_grad_norm": 0.5}
    args = transformers.TrainingArguments(str(folder), **arguments(None, **{**sizes, **often, **more}))
    kind, chosen = (transformers.Trainer, {}) if config is None else (zeromesh.hf.Trainer, {"zeromesh": dict(config)})
    if own_loss:  # evaluated by the loss alone
        chosen["compute_loss_func"] = mean_loss
    else:
        chosen["compute_metrics"] = lambda found: {"spread": float(found.predictions.std())}
    # The last update of an epoch has one micro-batch, not two.
    data = {"train_dataset": samples(5 * BATCH, ignored=5), "eval_dataset": samples(8, 2)}
    trainer = kind(model(), args, **data, **chosen)
    trainer.train()
    return outcome(trainer, folder)


LIBRARIES: dict[str, Callable[..., Result]] = {
    "transformers": transformers_trainer,
    "transformers-epochs": transformers_epochs,
    "accelerate": accelerate_loop,
    "peft": peft_adapters,
    "bitsandbytes": quantized_base,
    "bitsandbytes-sft": quantized_sft,
    "trl-sft": trl_sft,
    "trl-dpo": trl_dpo,
    "trl-grpo": trl_grpo,
    "lightning": lightning_module,
    "lightning-sgd": partial(lightning_module, sgd=True),
    "own": own_trainer,
}


@contextmanager
def fresh_libraries() -> Any:
    """Forget what Accelerate and transformers keep for the whole process, also for the tests that come after."""
    before = dict(os.environ)
    # Processors only, as ranks of tests have no other backend than gloo.
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
    try:
        yield
    finally:
        from accelerate.state import AcceleratorState, GradientState
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def train(library: str, folder: Path, config: Config, **more: Any) -> Result:
    """Run one training in this process, or as one of its ranks."""
    from zeromesh.hf.late import activate

    with fresh_libraries():
        if config is not None:
            activate()
        return LIBRARIES[library](folder, config, **more)


def write(folder: Path, config: Config) -> str:
    """Return the path of a configuration's file."""
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return str(file)
