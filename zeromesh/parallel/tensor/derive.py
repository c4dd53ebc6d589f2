"""A plan for a model that brings none, or not all of it: found by looking at its modules, and by tracing others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.functional import gelu, relu

from zeromesh.base import model_names
from zeromesh.base.dry.model_inputs import ModelInput
from zeromesh.base.substitution import computes_as, has_hooks, is_adapted, is_as_written, is_known, runs_another_forward
from zeromesh.parallel.tensor.heads import Heads, heads_of
from zeromesh.parallel.tensor.published import (
    GATHERING,
    SHARED,
    completed,
    gathered,
    inputs_of,
    is_activation,
    outputs_of,
    published,
)
from zeromesh.parallel.tensor.split_plan import CONTAINERS, Plan, PlanRule, base_of, kind_of, pattern_of
from zeromesh.parallel.tensor.styles import STYLES
from zeromesh.parallel.tensor.traced_plan import traced_plan

# In classes of transformers, attention and MLPs are found by the names of their layers and by shapes that fit: layers
# that are split by columns, and one split by rows that reads what was made of them. Where something stands in between
# that looks at all of the split dim, such as a norm over all heads, each layer is split by itself, and activations are
# gathered. In other classes, and for such layers and those that names leave in blocks, the forward is traced
# (``parallel/tensor/traced_plan.py``). What is split in neither way stays whole.

LOCAL = ("colwise", "packed_colwise", "rowwise")  # activations between layers of these styles are split
Rules = Iterator[tuple[str, PlanRule]]


def derive(
    model: nn.Module, ranks: int = 1, sample: Callable[[], ModelInput | None] = lambda: None
) -> tuple[dict[str, PlanRule], list[str]]:
    """Return a plan for a model, and lines that say which large layers it leaves whole, or gathers, and why.

    ``sample`` returns an input of the run, with which classes that are not known are traced; else one is guessed.
    """
    modules = dict(model.named_modules())
    # A model of transformers that has a plan of its own is split by it. What that leaves out is found as for others.
    published_plan = published(model)
    plan: dict[str, PlanRule] = {}
    notes: list[str] = []
    config = getattr(model, "config", None)
    for name, module in modules.items():
        region = dict(_regions(name, module, modules, config, ranks))
        if torch_layers := _torch_layers(name, module, ranks):
            region = torch_layers
        elif not is_known(module) and not computes_as(module, nn.Sequential):
            region = {}
        elif not all(is_as_written(modules[path.rpartition(".")[0]]) for path in region if is_known(module)):
            region = gathered(region, modules)
        said = {path: published_plan[path] for path in region if path in published_plan}
        # The published plan gathers the outputs of fused layers, whose parts it does not know; where they are known
        # here, they are split together.
        gathers = all(rule.style in GATHERING for rule in said.values())
        if said and gathers and any(rule.sections for rule in region.values()):
            published_plan = {path: rule for path, rule in published_plan.items() if path not in region}
        elif said:
            published_plan = published_plan if gathers else completed(name, module, published_plan, region)
            continue
        plan |= {path: rule for path, rule in region.items() if path not in plan}
        if is_known(module) and not any(
            f"{name}.{key}" in published_plan for key, _ in module.named_parameters(recurse=False)
        ):
            plan |= dict(_experts(name, module)) | dict(_stacked_experts(name, module, ranks))
            plan |= dict(_layers_of_experts(name, module, ranks))
    plan |= published_plan | _vocabulary(model, modules)
    unsplit_lines = []
    unknown: dict[str, bool] = {}  # layers to be traced, and whether they are split though that gathers what they give
    for name, module in modules.items():
        fits = isinstance(module, nn.EmbeddingBag) and module.max_norm is None and module.embedding_dim % ranks == 0
        if fits and kind_of(module) == "bag":
            plan.setdefault(name, PlanRule("embedding_colwise"))
        around, parent = _around(name, modules), name.rpartition(".")[0]
        trusted = _in_block(name) and is_known(around)
        # A layer with few outputs, such as a head over some classes, is not worth gathering.
        large = kind_of(module) == "linear" and 4 * outputs_of(module) >= inputs_of(module)
        around_known = is_known(around)
        adapter = any(hasattr(modules[outer], "base_layer") for outer in _outer(name))
        alone = plan.get(name) in (None, *_BY_ITSELF)
        if name and kind_of(base_of(module)) == "linear" and alone and not (adapter or _reads_weights(around)):
            # In known classes, what is outside of blocks is small, and what names leave whole is not worth gathering.
            unknown |= {name: name in plan or (large and not around_known)} if trusted or not around_known else {}
        if name not in plan and large and not trusted and not adapter and not _reads_weights(around):
            plan[name] = PlanRule("colwise_gather_output")
        inside = kind_of(modules[parent]) == "attention" and parent in plan
        if kind_of(module) == "linear" and name not in plan and _in_block(name) and not inside:
            unsplit_lines.append(f"{pattern_of(name)} ({type(module).__name__}) stays whole on all ranks")
    # A model's own code may read the weight of its embedding or its head, too, as where the two are one.
    cut = [name for name in plan.keys() & modules.keys() - unknown.keys() if STYLES[plan[name].style].cut]
    users = {name: _around(name, modules) for name in cut}
    others = sorted(name for name, user in users.items() if not (is_known(user) or _reads_weights(user)))
    if (unknown or others) and ranks > 1:
        traced, more, read = traced_plan(model, unknown, ranks, sample, others)
        plan = {name: rule for name, rule in plan.items() if name not in read}
        if traced is not None:
            # What is split by itself stays as names have it, which may be by rows.
            traced |= {name: plan[name] for name, rule in traced.items() if rule in _BY_ITSELF and name in plan}
            plan = {name: rule for name, rule in plan.items() if name not in unknown} | traced
        notes += more if traced is not None or any(unknown.values()) else []
        unsplit_lines = [line for line in unsplit_lines if line.partition(" ")[0] not in map(pattern_of, traced or ())]
    return _patterns(_without_shared(plan, modules), model), list(dict.fromkeys([*notes, *unsplit_lines]))


def _without_shared(plan: Plan, modules: Mapping[str, nn.Module]) -> dict[str, PlanRule]:
    """Return the rules of layers whose weights no module has, too, that reads them whole."""
    # Biases may be registered once more with the module around, as BERT's, which does not read them.
    weights = {
        name: {id(p) for p in module._parameters.values() if p is not None and p.ndim > 1}
        for name, module in modules.items()
    }
    cutting = {name for name, rule in plan.items() if STYLES[rule.style].cut is not None}
    whole_ids = {key for name in modules.keys() - cutting if not cutting & {*_outer(name)} for key in weights[name]}
    shared = {name for name in cutting & modules.keys() if whole_ids & weights[name]}
    rest = {name: rule for name, rule in plan.items() if name not in shared}
    return _without_shared(rest, modules) if shared else rest


_BY_ITSELF = tuple(PlanRule(style) for style in GATHERING)


def _outer(name: str) -> Iterator[str]:
    """Yield the names of the modules around."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _torch_layers(name: str, module: nn.Module, ranks: int) -> dict[str, PlanRule]:
    """Return rules for torch's own attention, and for the MLPs of its transformers."""
    if kind_of(module) == "attention":
        few = module.num_heads < ranks  # type: ignore[operator]
        return {} if few or name.endswith("base_layer") else {name: PlanRule("heads")}
    if not any(computes_as(module, kind) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return {}
    between = [module.activation, module.dropout]
    elementwise = all(
        step in (relu, gelu) or (isinstance(step, nn.Module) and _is_elementwise(step)) for step in between
    )
    layers = {f"{name}.linear{n}": getattr(module, f"linear{n}") for n in (1, 2)}
    styles = LOCAL[::2] if elementwise and not any(map(has_hooks, layers.values())) else GATHERING
    linear = all(kind_of(layer) == "linear" for layer in layers.values())
    return {path: PlanRule(style) for path, style in zip(layers, styles, strict=True)} if linear else {}


def _patterns(plan: Plan, model: nn.Module) -> dict[str, PlanRule]:
    """Replace the rules of modules that are called alike by one, unless they differ, as in blocks of several kinds."""
    # The last part of a name stays: the layers of one ``nn.Sequential`` are not alike.
    alike: dict[str, list[str]] = {}
    for name, _ in (*model.named_modules(), *model.named_parameters()):
        container, dot, child = name.rpartition(".")
        alike.setdefault(f"{pattern_of(container)}{dot}{child}", []).append(name)
    merged_plan: dict[str, PlanRule] = {}
    for pattern, members in alike.items():
        rules = {name: plan[name] for name in members if name in plan}
        one_rule = len(rules) == len(members) and len(set(rules.values())) == 1
        merged_plan |= {pattern: rules[members[0]]} if one_rule else rules
    return merged_plan


def _experts(name: str, module: nn.Module) -> Rules:
    """Yield rules for the stacked weights of experts, in the layout of ``use_experts_implementation``."""
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
    up = next((key for key in ("gate_up_proj", "up_proj") if key in shapes), None)
    keys = {key for key in (up, "down_proj", f"{up}_bias", "down_proj_bias")}
    if not hasattr(module, "is_transposed") or up is None or "down_proj" not in shapes or shapes.keys() - keys:
        return
    transposed, fused = module.is_transposed, up == "gate_up_proj"
    packed = "packed_" if fused and getattr(module, "is_concatenated", True) else ""
    last, other = ("rowwise", "colwise") if transposed else ("colwise", "rowwise")
    yield f"{name}.{up}", PlanRule(packed + last, block=2 if fused and not packed else 1)
    yield f"{name}.down_proj", PlanRule(other)
    if f"{up}_bias" in shapes:
        yield f"{name}.{up}_bias", PlanRule(f"{packed}rowwise", block=2 if fused and not packed else 1)
    if "down_proj_bias" in shapes:
        yield f"{name}.down_proj_bias", PlanRule("moe_shared_bias")
    yield name, PlanRule("moe_tp_experts")


def _stacked_experts(name: str, module: nn.Module, ranks: int) -> Rules:
    """Yield rules for experts whose matrices are the rows of one weight each: DBRX's."""
    weights = dict(getattr(module, "mlp", nn.Module()).named_parameters(recurse=False))
    count, width = (getattr(module, key, 0) for key in ("num_experts", "ffn_hidden_size"))
    stacked = weights.keys() == {"w1", "v1", "w2"} and all(len(w) == count * width for w in weights.values())
    if stacked and width % ranks == 0:
        yield from ((f"{name}.mlp.{key}", PlanRule("packed_colwise", (width,) * count)) for key in weights)
        yield name, PlanRule("moe_tp_experts")


def _layers_of_experts(name: str, module: nn.Module, ranks: int) -> Rules:
    """Yield rules for two modules that each hold one layer of all experts, weights (experts, outputs, inputs)."""
    first: Any = getattr(module, "input_linear", None)
    last: Any = getattr(module, "output_linear", None)
    if not (_is_layer_of_experts(first) and _is_layer_of_experts(last)):
        return
    outputs, inputs = first.output_size, last.input_size
    # Activations between them are split, unless something else looks at all of them, as JetMoe's attention does.
    gathers, gated = hasattr(module, "reduce"), outputs == 2 * inputs
    if not (gated or outputs == inputs) or inputs % ranks:
        return
    more = ("_gather_output", "_split_input") if gathers else ("", "")
    yield f"{name}.input_linear.weight", PlanRule("packed_colwise" if gated else "colwise", block=1)
    yield f"{name}.input_linear", PlanRule(f"moe_colwise{more[0]}")
    yield f"{name}.output_linear.weight", PlanRule("rowwise", block=1)
    yield f"{name}.output_linear", PlanRule(f"moe_rowwise{more[1]}")


def _is_layer_of_experts(module: Any) -> bool:
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters()} if isinstance(module, nn.Module) else {}
    return shapes == {
        "weight": tuple(getattr(module, key, None) for key in ("num_experts", "output_size", "input_size"))
    }


def _regions(name: str, module: nn.Module, modules: Mapping[str, nn.Module], config: Any, ranks: int) -> Rules:
    """Yield rules for the layers of an attention or an MLP whose columns are children of the module."""
    if _reads_weights(module):
        return
    path = f"{name}." if name else ""
    layers = {child: m for child, m in module.named_children() if kind_of(base_of(m)) == "linear"}
    outputs = [child for child in layers if model_names.OUTPUTS.match(child)]
    row: str | None = None
    for pattern, beside in model_names.PAIRS:
        parent = name.rpartition(".")[0]
        if pattern.search(name) and f"{parent}.{beside}" in modules:
            row, outputs = f"{parent}.{beside}", []
    is_pair = computes_as(module, nn.Sequential) and len(layers) == 2 and not any(map(has_hooks, layers.values()))
    if is_pair and all(_is_elementwise(m) for m in module.children() if m not in layers.values()):
        outputs = list(layers)[-1:]
    if row is None and len(outputs) == 1:
        row = path + outputs[0]
    columns = {child: m for child, m in layers.items() if path + child != row}
    if row is None or not columns or not name:
        return
    width, heads = inputs_of(modules[row]), heads_of(module, config)
    if heads is not None and model_names.LATENT in columns:
        yield from _latent(path, module, columns, row, heads)
    elif model_names.ALL_HEADS.match(type(module).__name__):
        yield from _each(path, columns, row)
    elif heads is not None and heads.queries * heads.width == width:
        few = heads.queries < ranks  # as in the first stages of pyramids
        yield from _each(path, columns, row) if few else _attention(path, module, columns, row, heads)
    elif heads is None:
        yield from _mlp(path, module, columns, row, modules[row])


def _is_elementwise(module: nn.Module) -> bool:
    """Return whether it surely looks at each entry by itself: dropout, or an activation."""
    kind = type(module)
    apart = kind.__name__ in ("Softmax", "LogSoftmax", "Softmin", "GLU", "Softmax2d", "MultiheadAttention")
    changed = apart or runs_another_forward(module) or has_hooks(module)
    return kind.__module__.endswith(("modules.dropout", "activation", "activations")) and not changed


def _latent(path: str, module: nn.Module, columns: Mapping[str, nn.Module], row: str, heads: Heads) -> Rules:
    """Yield rules for attention with keys and values from a narrow activation (DeepSeek-AI, "DeepSeek-V2", 2024)."""
    latent, rotary = inputs_of(columns[model_names.LATENT]), getattr(module, model_names.ROTARY_WIDTH, 0)
    rules: dict[str, PlanRule] = {}
    for child, layer in columns.items():
        size = outputs_of(layer)
        if child.startswith("kv_a") and size == latent + rotary:
            rules[path + child] = PlanRule("mla_kv_a_proj")
        elif child in model_names.LATENT_COLUMNS and size % heads.queries == 0:
            rules[path + child] = PlanRule("colwise", block=size // heads.queries)
    names = {*columns, row.removeprefix(path), *model_names.LATENT_NORMS}
    others = [child for child, m in module.named_children() if child not in names and any(True for _ in m.parameters())]
    known_all = columns.keys() - {"q_a_proj"} == {child.removeprefix(path) for child in rules}
    narrow = any(rule.style == "mla_kv_a_proj" for rule in rules.values())
    if others or not known_all or not narrow or next(module.parameters(recurse=False), None) is not None:
        yield from _each(path, columns, row)
        return
    width = inputs_of(module.get_submodule(row.removeprefix(path)))
    yield from (rules | {row: PlanRule("rowwise", block=width // heads.queries)}).items()


def _attention(path: str, module: nn.Module, columns: Mapping[str, nn.Module], row: str, heads: Heads) -> Rules:
    q, k = heads.queries * heads.width, heads.keys * heads.width
    rules: dict[str, PlanRule] = {}
    # Where keys have a layer of their own, what is as large as a fused weight are queries with gates.
    is_fused = not any(model_names.OF_KEYS.match(child) for child in columns)
    for child, layer in columns.items():
        size = outputs_of(layer)
        if size in (q, k):
            rules[path + child] = PlanRule("colwise", block=heads.width)
        elif (
            is_fused and size == q + 2 * k and child == model_names.INTERLEAVED and heads.keys > 1
        ):  # else both layouts are one
            rules[path + child] = PlanRule("colwise", block=size // heads.keys)
        elif is_fused and size == q + 2 * k:
            rules[path + child] = PlanRule("packed_colwise", (q, k, k), heads.width)
    rules[row] = PlanRule("rowwise", block=heads.width)
    is_complete = len(rules) == len(columns) + 1
    for child, other in module.named_children():
        sizes = {tuple(p.shape) for p in other.parameters()}
        if path + child in rules or not sizes:
            continue
        if kind_of(other) == "embedding" and all(shape[-1] == heads.queries for shape in sizes):
            rules[path + child] = PlanRule("colwise")
        elif sizes == {(heads.width,)}:
            rules[path + child] = PlanRule("replicated_with_grad_allreduce")
        else:
            is_complete = False
    for child, parameter in module.named_parameters(recurse=False):
        if tuple(parameter.shape) == (heads.queries,):
            rules[path + child] = PlanRule("colwise")
        else:
            is_complete = False
    yield from rules.items() if is_complete else _each(path, columns, row)


def _mlp(path: str, module: nn.Module, columns: Mapping[str, nn.Module], row: str, last: nn.Module) -> Rules:
    width, sizes = inputs_of(last), [outputs_of(layer) for layer in columns.values()]
    fused = len(sizes) == 1 and sizes[0] == 2 * width
    same = {inputs_of(layer) for layer in columns.values()} == {outputs_of(last)}
    if not same or not (fused or set(sizes) == {width}):
        return
    # What lies between them may look at all of the width.
    others = {child: m for child, m in module.named_children() if child not in columns and m is not last}
    wide = {dim for m in others.values() for p in m.parameters() for dim in p.shape} & {width, *sizes}
    if (
        wide
        or any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in module.modules())
        or list(module.parameters(recurse=False))
    ):
        yield from _each(path, columns, row)
        return
    yield from ((path + child, SHARED) for child, m in others.items() if is_activation(m))
    for child in columns:
        yield path + child, PlanRule("packed_colwise", (width, width)) if fused else PlanRule("colwise")
    yield row, PlanRule("rowwise")


def _each(path: str, columns: Mapping[str, nn.Module], row: str) -> Rules:
    """Split each layer by itself."""
    for child in columns:
        yield path + child, PlanRule("colwise_gather_output")
    yield row, PlanRule("rowwise_split_input")


def _in_block(name: str) -> bool:
    """Return whether it is in one of several alike."""
    return any(part.isdigit() for part in name.split("."))


def _around(name: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module that calls a layer: the nearest one that is no container, and no adapter."""
    while name:
        name = name.rpartition(".")[0]
        module = modules[name]
        if not isinstance(module, CONTAINERS) and not is_adapted(module):
            return module
    return modules[""]


def _reads_weights(module: nn.Module) -> bool:
    """Return whether a module of torch, such as its attention, reads the weights of layers without calling them."""
    is_torchs = type(module).__module__.startswith("torch.") and not isinstance(module, CONTAINERS)
    return is_torchs or isinstance(module, nn.MultiheadAttention)


def _vocabulary(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, PlanRule]:
    """Return rules for the embedding of tokens, wherever it is, and for the head over the same entries."""
    outside = {name: m for name, m in modules.items() if not _in_block(name)}
    tables = {name: m for name, m in outside.items() if isinstance(m, nn.Embedding) and _has_plain_rows(m)}
    embeddings = [
        m for m in (_ask(model, "get_input_embeddings"),) if isinstance(m, nn.Embedding) and _has_plain_rows(m)
    ]
    embeddings = embeddings or sorted(tables.values(), key=lambda m: -m.num_embeddings)[:1]
    if not embeddings:
        return {}
    weights, size = {id(m.weight) for m in embeddings}, max(m.num_embeddings for m in embeddings)
    plan = {name: PlanRule("embedding_rowwise") for name, m in tables.items() if id(m.weight) in weights}
    # What an embedding does with the rows, a norm for instance, each rank does with its own.
    plan |= {
        f"{name}.{child}": SHARED for name in plan for child, m in tables[name].named_children() if [*m.parameters()]
    }
    head = _ask(model, "get_output_embeddings")
    for name, m in outside.items():
        fits = kind_of(m) == "linear" and outputs_of(m) == size and head in (m, None)
        if fits or (kind_of(m) == "linear" and id(m.weight) in weights):
            plan[name] = PlanRule("vocabulary")
    return plan


def _has_plain_rows(table: nn.Embedding) -> bool:
    """Return whether a rank's rows, and their gradients, depend on nothing else."""
    return table.max_norm is None and not table.scale_grad_by_freq and kind_of(table) == "embedding"


def heads_over_vocabulary(model: nn.Module) -> list[str]:
    """Return the names of the linear layers over the entries of the token embedding; raise ValueError without one."""
    rules = _vocabulary(model, dict(model.named_modules())).items()
    heads = [name for name, rule in rules if rule.style == "vocabulary"]
    if not heads:
        raise ValueError(
            f"chunked_loss is true, but {type(model).__name__} has no linear layer over the entries of an embedding; "
            "leave it out"
        )
    return heads


def _ask(model: nn.Module, question: str) -> nn.Module | None:
    """Return the module with which a model of transformers answers; None of others, or where it has none."""
    try:
        answer = getattr(model, question)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return answer if isinstance(answer, nn.Module) else None
