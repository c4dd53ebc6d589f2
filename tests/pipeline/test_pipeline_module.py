"""DeepSpeed's PipelineModule: lists of layers train to the same numbers whole and in stages; nobody holds the whole."""

import copy
import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zeromesh
from compare import assert_close
from harness import on_ranks, run_ranks
from heap import Heap
from run import adamw, configuration, sgd, start_engine
from zeromesh import Settings
from zeromesh.base.loader import Position
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.weights import pretrained
from zeromesh.checkpoint.weights.weight_files import FileTensor
from zeromesh.engine.pipeline_module import settings_of
from zeromesh.parallel.pipeline.runtime.cut import examine, take_away
from zeromesh.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from zeromesh.shard.parameters import deferred

LIMIT = 240
STEPS = 2
WIDTH, WORDS, LENGTH, SAMPLES = 16, 40, 6, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, ids, positions = given
        if self.training:
            self.last.copy_(torch.maximum(self.last, positions.max()))
        scale = (ids > 3)[..., None] * (1 + positions[..., None] % 3)
        return x + self.down(self.up(self.norm(x)).relu()) * scale, ids, positions


def enter(embedding: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    ids, positions = given
    return embedding(ids), ids, positions


def first_of(given: tuple[Tensor, ...]) -> Tensor:
    return given[0]


def logits(embedding: nn.Module, x: Tensor) -> Tensor:
    return x @ embedding.weight.t()


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def decoder(blocks: int = 6, **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, WORDS, WIDTH, forward_fn=enter),
        *(LayerSpec(Block, WIDTH) for _ in range(blocks)),
        first_of,
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, WORDS, WIDTH, forward_fn=logits),
    ]
    return PipelineModule(layers, loss_fn=cross_entropy, **options).double()


def micro_batches(step: int, count: int, rank: int, size: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(step)
    for number in range(count):
        length = LENGTH + (step + number) % 2
        ids = torch.randint(0, WORDS, (SAMPLES, length), generator=generator).chunk(size)[rank]
        positions = torch.arange(length).expand(len(ids), length)
        yield [ids, positions], ids.roll(-1, 1)  # DeepSpeed makes tuples of lists, too


def start(model: nn.Module, **further: Any) -> zeromesh.Engine:
    data = further.pop("data", 1)
    return start_engine(
        model, further, batch=4 * SAMPLES, micro=SAMPLES // data, optimizer=adamw(1e-2, eps=1e-4), clipping=0.5
    )


def advance(engine: zeromesh.Engine, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        given = micro_batches(engine.global_steps, 4, engine.data_rank, engine.data_size)
        found += [float(engine.train_batch(given)), engine.get_global_grad_norm()]
    return found


def train(stages: int | None = None, data: int = 1, options: dict[str, Any] | None = None, **further: Any) -> Any:
    engine = start(decoder(num_stages=stages, **(options or {})), data=data, **further)
    found = [float(engine.eval_batch(micro_batches(100, 4, engine.data_rank, engine.data_size)))]
    found += advance(engine, STEPS)
    names = [name for name, _ in engine.module.named_parameters()]
    return found, engine.state_dict(), names


CASES: dict[str, dict[str, Any]] = {
    "whole, row 3, 2 ranks": {"data": 2, "zero_optimization": {"stage": 3}},
    "2 stages": {"stages": 2},
    "4 stages": {"stages": 4},
    "2 stages, row 3, 4 ranks": {"stages": 2, "data": 2, "zero_optimization": {"stage": 3}},
    "2 stages, recomputed": {"stages": 2, "options": {"activation_checkpoint_interval": 2}},
    "2 x 2 stages, interleaved, uniform": {
        "stages": 2,
        "pipeline": {"schedule": "interleaved-1f1b", "chunks": 2},
        "options": {"partition_method": "uniform"},
    },
    "2 x 2 stages, zb-v, row 3, recomputed": {
        "stages": 2,
        "pipeline": {"schedule": "zb-v", "chunks": 2},
        "zero_optimization": {"stage": 3},
        "options": {"activation_checkpoint_interval": 3, "partition_method": "type:block"},
    },
}


@cache
def in_one_process() -> Any:
    return run_ranks(train, 1, timeout=LIMIT)[0]


@pytest.mark.some(3)
@pytest.mark.parametrize("case", CASES)
def test_stages_train_to_the_numbers_of_one_process(case: str) -> None:
    chosen = CASES[case]
    expected, state, names = in_one_process()
    assert names[:2] == ["tied_modules.embedding.weight", "1.norm.weight"]
    seen = set()
    for found, whole, held in run_ranks(
        train, chosen.get("stages", 1) * chosen.get("data", 1), timeout=LIMIT, **chosen
    ):
        assert found == pytest.approx(expected, rel=1e-9)
        assert whole.keys() == state.keys()
        assert_close(state, whole, 0, 1e-8)
        assert "stages" not in chosen or len(held) < len(names)
        seen.update(held)
    assert seen == set(names)


LARGE, ENTRIES, BLOCKS, STAGES = 512, 4096, 8, 4
MIB = 1 << 20


class Wide(nn.Module):  # A block of 8 MiB
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(LARGE, 4 * LARGE, bias=False), nn.Linear(4 * LARGE, LARGE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Ordinary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ENTRIES, LARGE)
        self.layers = nn.ModuleList(Wide() for _ in range(BLOCKS))
        self.head = nn.Linear(LARGE, ENTRIES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x), labels)


def list_of_layers(folder: str) -> nn.Module:
    embedding = partial(TiedLayerSpec, "embedding", nn.Embedding, ENTRIES, LARGE)
    layers = [embedding(), *(LayerSpec(Wide) for _ in range(BLOCKS)), embedding(forward_fn=logits)]
    return PipelineModule(layers, STAGES, loss_fn=cross_entropy, partition_method=[0, 3, 5, 7])


def under_init(folder: str) -> nn.Module:
    with zeromesh.zero.Init():
        return Ordinary()


def from_files(folder: str) -> nn.Module:
    return zeromesh.from_pretrained(folder)


BUILD: dict[str, Callable[[str], nn.Module]] = {
    "PipelineModule": list_of_layers,
    "zero.Init": under_init,
    "from_pretrained": from_files,
}


def llama() -> nn.Module:
    import transformers

    sizes = {"hidden_size": LARGE, "intermediate_size": 1024, "num_hidden_layers": BLOCKS, "vocab_size": ENTRIES}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=8, tie_word_embeddings=True)
    )


def build_stage(how: str, folder: str) -> Any:
    heap, read, reading = Heap(), [], FileTensor.read

    def noted(self: FileTensor, start: int, stop: int) -> Tensor:
        read.append(stop - start)
        return reading(self, start, stop)

    settings: dict[str, Any] = configuration(batch=4, accumulation=4, optimizer=sgd(1e-3))
    if how != "PipelineModule":
        settings |= {"mesh": {"pipeline": STAGES}, "pipeline": {"partition": [0, 2, 4, 6]}}
    for _ in range(2):  # the first time for what libraries allocate once
        engine = None
        read.clear()
        gc.collect()
        before = heap.live()
        with heap.watch() as peak, patch.object(FileTensor, "read", noted), patch.object(pretrained, "HASHED", 0):
            engine = zeromesh.initialize(model=BUILD[how](folder), config=settings)[0]
    held = {name: parameter.nbytes for name, parameter in engine.module.named_parameters()}
    ids = torch.zeros((1, 4), dtype=torch.long)
    given = {"input_ids": ids, "labels": ids} if how == "from_pretrained" else (ids, ids)
    assert torch.isfinite(engine.train_batch(iter([given] * 4)))
    return held, peak.bytes - before, 4 * sum(read)


@pytest.mark.some(1)
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the heap is measured through glibc")
@pytest.mark.parametrize("how", BUILD)
def test_no_rank_ever_holds_more_than_its_stages_and_one_tensor(how: str, tmp_path: Path) -> None:
    if how == "from_pretrained":
        llama().save_pretrained(tmp_path)
    ranks = run_ranks(build_stage, STAGES, how, str(tmp_path), timeout=LIMIT)
    table, matrix = 4 * ENTRIES * LARGE, 4 * 4 * LARGE * LARGE
    # A block of transformers has four square matrices, three of twice that size, and two norms.
    block, norm = (2 * matrix, 0) if how != "from_pretrained" else (10 * 4 * LARGE * LARGE + 8 * LARGE, 4 * LARGE)
    whole = BLOCKS * block + table + norm
    assert whole > 60 * MIB
    for stage, (held, most, read) in enumerate(ranks):
        own = BLOCKS // STAGES * block + table * (stage in (0, STAGES - 1)) + norm * (stage == STAGES - 1)
        assert sum(held.values()) == own
        # Beside these, the random numbers of one tensor at a time; of all stages, tensors below 32 KiB.
        assert most <= own + (table if how != "from_pretrained" else 0) + 2 * MIB < whole * 0.6
        assert (own <= read <= own + MIB // 4) if how == "from_pretrained" else read == 0


def test_values_and_names_are_those_of_an_ordinary_construction() -> None:
    sizes = (64, 256), (256, 64)
    torch.manual_seed(5)
    ordinary = nn.Sequential(*(nn.Linear(*size) for size in sizes)).double()
    for context in (nullcontext(), zeromesh.zero.Init()):
        torch.manual_seed(5)
        with context:
            model = PipelineModule([LayerSpec(nn.Linear, *size) for size in sizes], num_stages=1).double()
        assert [parameter.is_meta for parameter in model.parameters()] == [True, False, True, False]
        assert model.state_dict().keys() == ordinary.state_dict().keys()
        for (name, value), expected in zip(model.named_parameters(), ordinary.parameters(), strict=True):
            assert torch.equal(deferred.replayed(value.data), expected), name


def test_layers_are_seeded_one_by_one() -> None:
    seeds: list[int] = []

    def seed(value: int) -> None:
        seeds.append(value)
        torch.manual_seed(value)

    layers = [LayerSpec(nn.Linear, 2, 3), LayerSpec(nn.Linear, 3, 2)]
    model = PipelineModule(layers, 1, seed_layers=True, seed_fn=seed, base_seed=7)
    assert seeds == [7, 8]
    torch.manual_seed(8)
    assert torch.equal(model.get_submodule("1").weight, nn.Linear(3, 2).weight)
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert seeds[2:] == [14, 15, 21, 22]


class Noise(nn.Module):
    calls: ClassVar[list[int]] = []

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.number)
        return nn.functional.dropout(x + self.linear(x), 0.5, self.training)


def train_noise(stages: int, interval: int, checkpointable: list[str] | None) -> Any:
    torch.manual_seed(0)
    layers = [LayerSpec(nn.Embedding, WORDS, WIDTH), *(LayerSpec(Noise, number) for number in range(5))]
    layers += [LayerSpec(nn.Linear, WIDTH, WORDS)]
    options = {"activation_checkpoint_interval": interval, "checkpointable_layers": checkpointable}
    model = PipelineModule(
        layers, stages, loss_fn=cross_entropy, partition_method="uniform", seed_layers=True, **options
    ).double()
    engine = start(model)
    Noise.calls.clear()
    found = []
    for step in range(STEPS):
        given = ((ids, labels) for (ids, _), labels in micro_batches(step, 4, 0, 1))
        found += [float(engine.train_batch(given)), engine.get_global_grad_norm()]
    return found, Counter(Noise.calls)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("stages", "interval", "checkpointable"), [(1, 2, None), (2, 1, None), (2, 3, None), (2, 1, ["Linear"])]
)
def test_layers_of_every_stage_are_recomputed_with_the_same_random_numbers(stages, interval, checkpointable) -> None:
    expected, _ = run_ranks(train_noise, 1, 1, 0, None)[0]
    calls: Counter[int] = Counter()
    for found, own in run_ranks(train_noise, stages, stages, interval, checkpointable, timeout=LIMIT):
        assert found == pytest.approx(expected, rel=1e-9)
        calls += own
    times = 1 if checkpointable else 2
    assert calls == dict.fromkeys(range(5), 4 * STEPS * times)


def save(folder: str) -> list[float]:
    engine = start(decoder(num_stages=2, partition_method="uniform"), zero_optimization={"stage": 1})
    advance(engine, 1)
    engine.save_checkpoint(folder, "two")
    return advance(engine, 1)


def resume(folder: str, stages: int) -> list[float]:
    engine = start(decoder(num_stages=stages))
    engine.load_checkpoint(folder, "two")
    return advance(engine, 1)


def test_a_checkpoint_goes_on_with_another_number_of_stages(tmp_path: Path) -> None:
    expected = run_ranks(save, 2, str(tmp_path), timeout=LIMIT)[0]
    assert "parameter/tied_modules.embedding.weight" in Reader(tmp_path / "two").names
    for stages in (4, 1):
        for found in run_ranks(resume, stages, str(tmp_path), stages, timeout=LIMIT):
            assert found == pytest.approx(expected, rel=1e-9)


def script(config: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    dataset = [(torch.rand(4), number % 3) for number in range(12)]
    model = zeromesh.pipe.PipelineModule(
        layers=[nn.Linear(4, 8), nn.ReLU(inplace=True), zeromesh.pipe.LayerSpec(nn.Linear, 8, 3), lambda x: x.relu()],
        loss_fn=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        num_stages=config.pop("stages"),
        partition_method="uniform",
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = zeromesh.initialize(model=model, model_parameters=trained, training_data=dataset, config=config)
    return [float(engine.train_batch()) for _ in range(4)], engine.data_position


def test_a_script_of_deepspeeds_users_runs_with_the_import_changed() -> None:
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
    (expected, position), *_ = run_ranks(script, 1, {**config, "stages": 1})
    assert position == (2, 8)  # 32 samples of 12
    for found, reached in run_ranks(script, 2, {**config, "stages": 2}):
        assert (found, reached) == (pytest.approx(expected, rel=1e-5), position)


def fed(shuffled: bool) -> Any:
    layer = nn.Linear(1, 1)
    model = nn.Sequential(layer) if shuffled else PipelineModule([layer], loss_fn=lambda outputs, labels: outputs.sum())
    data = [torch.tensor([float(number)]) for number in range(9)]
    loader = zeromesh.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2}, training_data=data)[2]
    passes = [torch.cat(list(loader)).flatten().tolist() for _ in range(2)]
    state = loader.state(Position(0, 4))
    loader.go_to(state)
    return passes, torch.cat(list(loader)).flatten().tolist(), state


def test_a_pipeline_module_is_fed_in_the_order_of_its_data() -> None:
    (first, left, state), (second, *_) = run_ranks(fed, 2, False)
    assert first == [[0, 2, 4, 6, 8]] * 2
    assert second == [[1, 3, 5, 7, 0]] * 2
    assert left == [4, 6, 8]
    assert state["seed"] is None
    (passes, _, state), _ = run_ranks(fed, 2, True)
    assert passes[0] != sorted(passes[0])
    assert passes[0] != passes[1]
    assert state["seed"] == 1234


def sum_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.sum() * 0 + 7


@on_ranks(1)
def test_the_loss_is_the_last_layers_or_the_functions_and_initializes_wins() -> None:
    settings = {"train_batch_size": 1}
    model = PipelineModule([nn.Linear(2, 2)], loss_fn=lambda outputs, labels: outputs.mean() * 0 + 3)
    given = [(torch.ones(1, 2), torch.ones(1))]
    engine = zeromesh.initialize(model=model, config=settings)[0]
    found = [float(engine.eval_batch(iter(given)))]
    engine.destroy()
    engine = zeromesh.initialize(model=model, config=settings, loss_fn=sum_of)[0]
    found.append(float(engine.eval_batch(iter(given))))
    model = PipelineModule([nn.Linear(2, 2), lambda pair: pair.sum() * 0 + 5], num_stages=1)
    engine = zeromesh.initialize(model=model, config=settings)[0]
    found.append(float(engine.eval_batch(iter(given))))
    with pytest.raises(ValueError, match="those of a PipelineModule are pairs of inputs and labels"):
        engine.eval_batch(iter([torch.ones(1, 2)]))
    with pytest.raises(ValueError, match="pass one, or training_data="):
        engine.train_batch()
    assert found == [3.0, 7.0, 5.0]


class Topology:  # as DeepSpeed's: an axis that is not there has the size 0
    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    def get_dim(self, axis: str) -> int:
        return self.sizes.get(axis, 0)


@pytest.mark.parametrize(
    ("options", "document", "stages", "partition"),
    [
        ({"num_stages": 2}, {}, 2, "parameters"),
        ({"num_stages": 2, "partition_method": "Uniform"}, {"mesh": {"pipeline": 2}}, 2, "uniform"),
        ({"num_stages": 2, "partition_method": "type:linear"}, {"pipeline": {"stages": 2}}, 2, "type:linear"),
        ({"topology": Topology(pipe=2, data=3)}, {"pipeline": {"partition": "uniform"}}, 2, "uniform"),
        ({"num_stages": 2}, {"pipeline": {"activation_checkpoint_interval": 1}}, 2, "parameters"),
        ({"topology": Topology(pipe=2, model=2)}, {"mesh": {"tensor": 2}}, 2, "parameters"),
        ({"partition_method": [0, 1]}, {"mesh": {"pipeline": 4}}, 4, [0, 1]),
        ({}, {}, 1, "parameters"),
    ],
)
def test_the_configuration_wins_and_the_model_says_what_it_leaves_out(options, document, stages, partition) -> None:
    model = PipelineModule([nn.Linear(1, 1)], activation_checkpoint_interval=3, **options)
    settings = settings_of(model, Settings.load(document), None)
    assert settings.model_sizes["pipeline"] == stages
    assert settings.pipeline.partition == partition
    assert model.activation_checkpoint_interval == document.get("pipeline", {}).get("activation_checkpoint_interval", 3)
    resolved = settings.resolve(1)  # nothing of it is lost there
    assert (resolved.model_sizes["pipeline"], resolved.pipeline.partition) == (stages, partition)


@pytest.mark.parametrize(
    ("options", "document", "message"),
    [
        ({"num_stages": 2}, {"mesh": {"pipeline": 4}}, r"has 2 stages .* configuration 4 \(mesh.pipeline\)"),
        ({"num_stages": 2}, {"mesh": {"pipeline": 1}}, "has 2 stages .* configuration 1"),
        ({"topology": Topology(pipe=2, model=2)}, {}, "set mesh.tensor to 2, and build the layers whole"),
    ],
)
def test_arguments_that_contradict_the_configuration_are_refused(options, document, message) -> None:
    model = PipelineModule([nn.Linear(1, 1)], **options)
    with pytest.raises(ValueError, match=message):
        settings_of(model, Settings.load(document), None)


def test_a_mesh_that_has_other_stages_is_refused() -> None:
    mesh: Any = SimpleNamespace(sizes={"pipeline": 1, "tensor": 1})
    with pytest.raises(ValueError, match="has 2 stages .* and the mesh 1"):
        settings_of(PipelineModule([nn.Linear(1, 1)], 2), Settings.load({}), mesh)


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no class": (lambda: LayerSpec(nn.Linear(1, 1)), "is given a class of torch.nn.Module"),
    "a function": (lambda: LayerSpec(torch.relu), "into the list of layers as they are"),
    "dots": (lambda: TiedLayerSpec("a.b", nn.Linear), "key is 'a.b'.*a word without a dot"),
    "method": (lambda: TiedLayerSpec("keys", nn.Linear), "key is 'keys'"),
    "no layer": (lambda: PipelineModule([None]), "layer 0 is None; layers are LayerSpecs, modules, or functions"),
    "none": (lambda: PipelineModule([]), "layers is empty"),
    "nested": (lambda: PipelineModule([PipelineModule([torch.relu])]), "layer 0 is a PipelineModule; put its layers"),
    "types": (
        lambda: PipelineModule([TiedLayerSpec("a", nn.Linear, 1, 1), TiedLayerSpec("a", nn.Embedding, 1, 1)]),
        "layer 1 is a Embedding with the key 'a', which is that of a Linear.*pass forward_fn",
    ),
    "stages": (lambda: PipelineModule([torch.relu], 0), "num_stages is 0"),
    "topology": (lambda: PipelineModule([torch.relu], topology=2), r"topology is 2; .* get_dim\('pipe'\)"),
    "both": (lambda: PipelineModule([torch.relu], 2, Topology(pipe=4)), "num_stages is 2, .* has 4; leave num_stages"),
    "partition": (
        lambda: PipelineModule([torch.relu], partition_method="profile"),
        "partition_method is 'profile'; use one of best, parameters, uniform, type:REGEX",
    ),
    "interval": (
        lambda: PipelineModule([torch.relu], activation_checkpoint_interval=-1),
        "activation_checkpoint_interval is -1",
    ),
    "a name": (lambda: PipelineModule([torch.relu], checkpointable_layers="Block"), r"such as \['Block'\]"),
    "blocks": (lambda: examine(PipelineModule([torch.relu]), ["0"]), "layers of a PipelineModule are its blocks"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_impossible_layers_and_arguments_are_refused(fault: str) -> None:
    action, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        action()


def test_writes_to_layers_without_memory_are_kept_or_refused() -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 2.0)

    model = PipelineModule([LayerSpec(nn.Linear, 128, 128), LayerSpec(nn.Linear, 2, 2)]).apply(fill)
    settings_of(model, Settings.load({}), None)
    assert bool((deferred.replayed(model.get_parameter("0.weight").data) == 2).all())
    fill(model.get_submodule("1"))  # it is small, and has memory
    settings_of(model, Settings.load({}), None)
    fill(model.get_submodule("0"))
    with pytest.raises(ValueError, match="parameter 0.weight was written to after its layer was made"):
        settings_of(model, Settings.load({}), None)


def test_a_buffer_of_a_tied_module_stays_where_the_module_is_used() -> None:
    norm = TiedLayerSpec("norm", nn.BatchNorm1d, 2)
    model = PipelineModule([norm, nn.Linear(2, 2), norm, nn.BatchNorm1d(2)])
    blocks = examine(model)
    assert blocks.uses["tied_modules.norm.weight"] == (0, 2)
    assert blocks.buffers["tied_modules.norm.running_mean"] == 0
    for stage, names in enumerate([{"tied_modules.norm"}, set(), {"tied_modules.norm"}, {"3"}]):
        one = copy.deepcopy(model)
        take_away(one, blocks.cut([0, 1, 2, 3]), [stage])
        assert {name.rpartition(".")[0] for name, _ in one.named_buffers()} == names
