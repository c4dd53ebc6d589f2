"""What a trainer cannot be given is an error that names it, before anything trains."""

import sys
from collections.abc import Callable
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest

import zeromesh
from harness import run_ranks
from hf_training import LIBRARIES, arguments, fresh_libraries, mean_loss, model, samples, stage
from zeromesh.deepspeed.finder import Finder, install
from zeromesh.deepspeed.plugin_check import HOME
from zeromesh.hf.late import activate

pytest.importorskip("accelerate")

THREE = {"zero_optimization": {"stage": 3}}


def trainer(folder: Path, config: Any, given: Any = None, **more: Any) -> None:
    import transformers

    import zeromesh.hf

    args = transformers.TrainingArguments(str(folder), **arguments(None, use_cpu=True, **more))
    zeromesh.hf.Trainer(given or model(), args, train_dataset=samples(8), zeromesh=config).train()


def plugin(folder: Path, config: Any, **options: Any) -> None:
    import zeromesh.hf

    zeromesh.hf.plugin(config, **options)


def engine() -> Any:
    import zeromesh.deepspeed

    return zeromesh.deepspeed.initialize(model=model(), config={"train_batch_size": 1})[0]


def taken() -> Any:
    """Return a model that has an engine."""
    given = model()
    _kept.append(zeromesh.initialize(given, config={"train_batch_size": 1})[0])
    return given


_kept: list[Any] = []


def engine_as_model(folder: Path) -> None:
    trainer(folder, THREE, zeromesh.initialize(model(), config={"train_batch_size": 1})[0])


def initialised_model(folder: Path) -> None:
    given = model()
    engine, *_ = zeromesh.initialize(given, config={"train_batch_size": 1})
    trainer(folder, THREE, given)
    engine.destroy()


def no_arguments(folder: Path) -> None:
    import zeromesh.hf

    zeromesh.hf.Trainer(model(), zeromesh=THREE)


def loss_of_wholes(folder: Path) -> None:
    import transformers

    import zeromesh.hf

    args = transformers.TrainingArguments(str(folder), **arguments(None, use_cpu=True))
    config = {**THREE, "mesh": {"context": 2}}
    zeromesh.hf.Trainer(model(), args, compute_loss_func=mean_loss, train_dataset=samples(8), zeromesh=config)


def stages_of_trl(folder: Path) -> None:
    import trl

    import zeromesh.hf

    kind = type("Mixed", (zeromesh.hf.TrainerMixin, trl.SFTTrainer), {})
    args = trl.SFTConfig(str(folder), **arguments(None, use_cpu=True))
    kind(model(), args, zeromesh={**THREE, "mesh": {"pipeline": 2}})


def two_configurations(folder: Path) -> None:
    trainer(folder, THREE, deepspeed=stage(2))


def of_trainer(config: Any, **more: Any) -> Callable[[Path], None]:
    return lambda folder: trainer(folder, config, **more)


def of_plugin(config: Any, **options: Any) -> Callable[[Path], None]:
    return lambda folder: plugin(folder, config, **options)


def by_alias(given: Callable[[], Any]) -> Callable[[Path], None]:
    """Return transformers' own Trainer under the alias."""

    def attempt(folder: Path) -> None:
        import transformers

        activate()
        args = transformers.TrainingArguments(str(folder), **arguments(stage(2)))
        transformers.Trainer(given(), args, train_dataset=samples(8)).train()

    return attempt


def own_plugin(config: Any, **options: Any) -> Callable[[Path], None]:
    """Accelerate's own plugin under the alias, as the import of Accelerate there finds it."""

    def attempt(_: Path) -> None:
        import accelerate.utils

        install()
        (finder,) = (one for one in sys.meta_path if isinstance(one, Finder))
        spec = finder.find_spec(HOME, accelerate.utils.__path__)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 2, **config}, **options)

    return attempt


def of_lightning(said: Any) -> Callable[[Path], None]:
    def attempt(folder: Path) -> None:
        LIBRARIES["lightning"](folder, stage(2), said=said)

    return attempt


CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "an engine": (engine_as_model, ("TypeError", "given an engine; pass the model itself")),
    "a model of an engine": (initialised_model, ("ValueError", "belongs to an engine already", "engine.destroy()")),
    "no arguments": (no_arguments, ("TypeError", "needs TrainingArguments")),
    "two configurations": (two_configurations, ("ValueError", "two configurations", "pass one")),
    "another clipping": (
        of_trainer({**THREE, "gradient_clipping": 0.5}),
        ("ValueError", "gradient_clipping=0.5", "max_grad_norm=1.0"),
    ),
    "another micro-batch": (
        of_trainer({**THREE, "train_micro_batch_size_per_gpu": 3}),
        ("ValueError", "train_micro_batch_size_per_gpu=3", "per_device_train_batch_size=4"),
    ),
    "stages": (of_plugin({**THREE, "mesh": {"pipeline": 2}}), ("ConfigError", "mesh.pipeline is 2", "train_batch")),
    "stages and smoothed labels": (
        of_trainer({**THREE, "mesh": {"pipeline": 2}}, label_smoothing_factor=0.1),
        ("ValueError", "mesh.pipeline", "label_smoothing_factor=0.1", "compute_loss_func="),
    ),
    "context and smoothed labels": (
        of_trainer({**THREE, "mesh": {"context": 2}}, label_smoothing_factor=0.1),
        ("ValueError", "mesh.context", "label_smoothing_factor=0.1", "the model computes its own loss"),
    ),
    "context and a loss of one's own": (
        loss_of_wholes,
        ("ValueError", "mesh.context", "compute_loss_func=", "the model computes its own loss"),
    ),
    "stages and TRL": (
        stages_of_trl,
        ("ValueError", "mesh.pipeline", "SFTTrainer exchanges", "set mesh.pipeline to 1"),
    ),
    "a batch of shared ranks": (
        of_trainer({**THREE, "train_batch_size": 4, "mesh": {"tensor": 2}}),
        ("ConfigError", "train_batch_size is 4", "leave it out"),
    ),
    "a plugin of two stages": (of_plugin(THREE, zero_stage=2), ("ValueError", "zero_stage=2", "has 3", "one place")),
    "a plugin of two clippings": (
        of_plugin({**THREE, "gradient_clipping": 1.0}, gradient_clipping=0.5),
        ("ValueError", "gradient_clipping=0.5", "has 1.0"),
    ),
    "a plugin with clipping alone": (
        of_plugin(THREE, gradient_clipping=0.5),
        ("ValueError", "gradient_clipping=0.5", "has 0.0"),  # the loop clips
    ),
    "a plugin with an option that has no key": (
        of_plugin(THREE, offload_param_device="cpu"),
        ("ValueError", "offload_param_device='cpu'", "has no zero_optimization.offload_param.device"),
    ),
    "Accelerate's plugin of two stages": (own_plugin(THREE, zero_stage=2), ("ValueError", "zero_stage=2", "has 3")),
    "Accelerate's plugin of two accumulations": (
        own_plugin({**THREE, "gradient_accumulation_steps": 2}, gradient_accumulation_steps=4),
        ("ValueError", "gradient_accumulation_steps=4", "has 2"),
    ),
    "Accelerate's plugin with accumulation alone": (
        own_plugin(THREE, gradient_accumulation_steps=4),
        ("ValueError", "gradient_accumulation_steps=4", "has 1"),  # Accelerate writes it
    ),
    "Accelerate's plugin with offload alone": (
        own_plugin(THREE, offload_param_device="cpu"),
        ("ValueError", "offload_param_device='cpu'", "has no zero_optimization.offload_param.device"),
    ),
    "Accelerate's plugin that agrees": (
        own_plugin(
            {"zero_optimization": {"stage": "auto"}, "gradient_clipping": 0.5},
            zero_stage=3,
            gradient_clipping=0.5,
            offload_optimizer_device="none",
        ),
        ("nothing",),
    ),
    "an engine under the alias": (by_alias(engine), ("ValueError", "was given an engine", "the model itself")),
    "a model of an engine under the alias": (by_alias(taken), ("ValueError", "belongs to an engine", "destroy()")),
    "Lightning's other clipping": (
        of_lightning({"gradient_clipping": 1.0}),
        ("ValueError", "gradient_clip_val=0.5", "has gradient_clipping 1.0"),
    ),
    "Lightning's other precision": (
        of_lightning({"bf16": {"enabled": True}}),
        ("ValueError", "precision='32-true'", "has bf16.enabled true"),
    ),
    "Lightning's other accumulation": (
        of_lightning({"gradient_accumulation_steps": 4}),
        ("MisconfigurationException", "gradient_accumulation_steps", "accumulate_grad_batches"),
    ),
    "Lightning that agrees": (of_lightning({"gradient_clipping": 0.5, "bf16": {"enabled": "auto"}}), ("nothing",)),
}


def messages(folder: Path) -> dict[str, str]:
    """Return the error of each case, with the name of its class."""
    found = {}
    for name, (attempt, _) in CASES.items():
        with fresh_libraries():
            try:
                attempt(folder)
                found[name] = "nothing"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def one_of_two(folder: Path) -> str:
    """Arguments that see one rank of two, as transformers does without an accelerator and without use_cpu."""
    import transformers

    import zeromesh.hf

    with fresh_libraries():
        args = transformers.TrainingArguments(str(folder), **arguments(None))
        try:
            zeromesh.hf.Trainer(model(), args, zeromesh=THREE)
        except ValueError as error:
            return str(error)
    return "nothing"


def test_what_a_trainer_cannot_take_is_named(tmp_path: Path) -> None:
    (found,) = run_ranks(messages, 1, tmp_path)
    missing = {
        (name, part): found[name] for name, (_, parts) in CASES.items() for part in parts if part not in found[name]
    }
    assert not missing


@pytest.mark.full
def test_arguments_that_see_one_rank_of_two_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(one_of_two, 2, tmp_path):
        assert "the launcher started 2" in found
        assert "use_cpu=True" in found
