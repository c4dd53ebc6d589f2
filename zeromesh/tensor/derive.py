"""A plan for a model that brings none, or not all of it: found by looking at its modules.

Attention and MLPs are found by what their layers are called and by shapes that fit: layers that are split by columns,
and one split by rows that reads what was made of them. Where something stands in between that looks at all of the
split dim, such as a norm over all heads, each layer is split by itself, and activations are gathered. What is split in
neither way stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zeromesh.tensor.heads import Heads, heads_of
from zeromesh.tensor.plan import Rule, is_transposed, kind_of, parse, pattern_of

_OUTPUT = re.compile(
    r"^(o|wo|w2|o_proj|out_proj|c_proj|dense|out_lin|out|proj|proj_out|attn_out|dense_4h_to_h|down_proj|fc2|fc_out|"
    r"fc_proj|lin2|ffn_output|linear2|linear_2|ff2|output|output_linear|c_out|proj_2|layer_2|dense_2|fc_2|down)$"
)
"""Names of layers that are split by rows."""

_PAIRS = (
    (re.compile(r"(^|\.)attention\.(self|attention|attn)$"), "output.dense"),
    (re.compile(r"(^|\.)intermediate$"), "output.dense"),
)
"""Where the layer split by rows is in a module beside: modules with the columns, and its name from their parent."""

_INTERLEAVED = re.compile(r"^(Bloom|GPTNeoX|Falcon|Persimmon|Fuyu|GPTNeoXJapanese)")
"""Classes of attention in whose fused weight the parts of a head, or of a group of heads, lie together."""


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

KNOWN = ("transformers.", "zeromesh.")
"""Begins of the names of Python modules whose classes of attention and MLPs compute what their layers' names say."""

_GATHERING = ("colwise_gather_output", "rowwise_split_input")


def derive(model: nn.Module) -> tuple[dict[str, Rule], list[str]]:
    """A plan for a model, and what of its large layers it leaves whole, with the reason.

    A model of transformers that has a plan of its own is split by it; what that leaves out is found as for others, and
    fused layers that it splits one by one are split together where their parts are known.
    """
    own = _published(model)
    plan: dict[str, Rule] = {}
    notes: list[str] = []
    modules = dict(model.named_modules())
    config = getattr(model, "config", None)
    for name, module in modules.items():
        region = {pattern_of(path): rule for path, rule in _regions(name, module, modules, config)}
        if not type(module).__module__.startswith(KNOWN):
            region = _one_by_one(region)
        known = {pattern: own[pattern] for pattern in region if pattern in own}
        # Of fused layers whose parts nobody told, the published plan gathers what they give.
        gathers = all(rule.style in _GATHERING for rule in known.values())
        if known and gathers and any(rule.sections for rule in region.values()):
            own = {pattern: rule for pattern, rule in own.items() if pattern not in region}
        elif known:
            continue
        for pattern, rule in region.items():
            plan.setdefault(pattern, rule)
    plan |= own | _vocabulary(model, modules)
    for name, module in modules.items():
        around = _around(name, modules)
        trusted = _in_block(name) and type(around).__module__.startswith(KNOWN)
        if _is_large(module) and not trusted and not _reads_weights(around):
            plan.setdefault(pattern_of(name), Rule("colwise_gather_output"))
            if _in_block(name):
                notes.append(
                    f"{pattern_of(name)} ({type(module).__name__}) is split by itself, with what it gives gathered, as "
                    f"nothing is known of {type(around).__name__}; a plan may say better"
                )
    for name, module in modules.items():
        if kind_of(module) == "linear" and pattern_of(name) not in plan and _in_block(name):
            notes.append(f"{pattern_of(name)} ({type(module).__name__}) stays whole on all ranks")
    return plan, list(dict.fromkeys(notes))


def _one_by_one(region: Mapping[str, Rule]) -> dict[str, Rule]:
    """A region of a module whose forward nobody knows: each of its layers is split by itself, which is right always."""
    styles = {"colwise": "colwise_gather_output", "packed_colwise": "colwise_gather_output"}
    styles |= {"rowwise": "rowwise_split_input"} | dict(zip(_GATHERING, _GATHERING, strict=True))
    return {pattern: Rule(styles[rule.style]) for pattern, rule in region.items() if rule.style in styles}


def _published(model: nn.Module) -> dict[str, Rule]:
    """The plan that a model of transformers has; without its embedding and head, which are found for all models."""
    given = getattr(model, "_tp_plan", None) or {}
    patterns = {pattern_of(name) for name, _ in model.named_modules()}
    patterns |= {pattern_of(name) for name, _ in model.named_parameters()}
    return {pattern: rule for pattern, rule in parse(given).items() if pattern in patterns}


def _regions(name: str, module: nn.Module, modules: Mapping[str, nn.Module], config: Any) -> Iterator[tuple[str, Rule]]:
    """Rules for the layers of an attention or an MLP whose columns are children of the module."""
    if _reads_weights(module):
        return
    path = f"{name}." if name else ""
    layers = {child: m for child, m in module.named_children() if kind_of(_base(m)) == "linear"}
    outputs = [child for child in layers if _OUTPUT.match(child)]
    row: str | None = None
    for pattern, beside in _PAIRS:
        parent = name.rpartition(".")[0]
        if pattern.search(name) and f"{parent}.{beside}" in modules:
            row, outputs = f"{parent}.{beside}", []
    if row is None and len(outputs) == 1:
        row = path + outputs[0]
    columns = {child: m for child, m in layers.items() if path + child != row}
    if row is None or not columns or not name:
        return
    width, heads = _inputs(modules[row]), heads_of(module, config)
    if heads is not None and heads.queries * heads.width == width:
        yield from _attention(path, module, columns, row, heads)
    elif heads is None:
        yield from _mlp(path, module, columns, row, modules[row])


def _attention(
    path: str, module: nn.Module, columns: Mapping[str, nn.Module], row: str, heads: Heads
) -> Iterator[tuple[str, Rule]]:
    q, k = heads.queries * heads.width, heads.keys * heads.width
    rules: dict[str, Rule] = {}
    for child, layer in columns.items():
        size = _outputs(layer)
        if size in (q, k):
            rules[path + child] = Rule("colwise", block=heads.width)
        elif size == q + 2 * k and _INTERLEAVED.match(type(module).__name__) and not _is_multi_query(module):
            rules[path + child] = Rule("colwise", block=size // heads.keys)
        elif size == q + 2 * k:
            rules[path + child] = Rule("packed_colwise", (q, k, k), heads.width)
    rules[row] = Rule("rowwise", block=heads.width)
    whole = len(rules) == len(columns) + 1
    for child, other in module.named_children():
        sizes = {tuple(p.shape) for p in other.parameters()}
        if path + child in rules or not sizes:
            continue
        if kind_of(other) == "embedding" and all(shape[-1] == heads.queries for shape in sizes):
            rules[path + child] = Rule("colwise")
        elif sizes == {(heads.width,)}:
            rules[path + child] = Rule("replicated_with_grad_allreduce")
        else:
            whole = False
    for child, parameter in module.named_parameters(recurse=False):
        if tuple(parameter.shape) == (heads.queries,):
            rules[path + child] = Rule("colwise")
        else:
            whole = False
    yield from rules.items() if whole else _each(path, columns, row)


def _is_multi_query(module: nn.Module) -> bool:
    return getattr(module, "multi_query", False) is True and not getattr(module, "new_decoder_architecture", False)


def _mlp(
    path: str, module: nn.Module, columns: Mapping[str, nn.Module], row: str, last: nn.Module
) -> Iterator[tuple[str, Rule]]:
    width, sizes = _inputs(last), [_outputs(layer) for layer in columns.values()]
    fused = len(sizes) == 1 and sizes[0] == 2 * width
    same = {_inputs(layer) for layer in columns.values()} == {_outputs(last)}
    if not same or not (fused or set(sizes) == {width}):
        return
    # What lies between them may look at all of the width.
    if any(isinstance(m, _CONVOLUTIONS) for m in module.modules()) or list(module.parameters(recurse=False)):
        yield from _each(path, columns, row)
        return
    for child in columns:
        yield path + child, Rule("packed_colwise", (width, width)) if fused else Rule("colwise")
    yield row, Rule("rowwise")


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _each(path: str, columns: Mapping[str, nn.Module], row: str) -> Iterator[tuple[str, Rule]]:
    """Each layer by itself."""
    for child in columns:
        yield path + child, Rule("colwise_gather_output")
    yield row, Rule("rowwise_split_input")


def _base(module: nn.Module) -> nn.Module:
    """The layer under adapters."""
    return getattr(module, "base_layer", module)


def _inputs(layer: nn.Module) -> int:
    weight: Any = _base(layer).weight
    return int(weight.shape[0] if is_transposed(_base(layer)) else weight.shape[1])


def _outputs(layer: nn.Module) -> int:
    weight: Any = _base(layer).weight
    return int(weight.shape[1] if is_transposed(_base(layer)) else weight.shape[0])


def _in_block(name: str) -> bool:
    """Whether it is in one of several alike."""
    return any(part.isdigit() for part in name.split("."))


def _around(name: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """The module that calls a layer: the nearest one that is no container, and no adapter."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        module = modules[path]
        inside = isinstance(module, CONTAINERS) or type(module).__module__.startswith("peft.")
        if not inside:
            return module
    return modules[""]


def _reads_weights(module: nn.Module) -> bool:
    """Whether it is a module of torch, such as its attention, that reads the weights of layers without calling them."""
    return type(module).__module__.startswith("torch.") and not isinstance(module, CONTAINERS)


def _is_large(module: nn.Module) -> bool:
    """Whether it is a linear layer that is worth a gather of what it gives: none that tells a few classes apart."""
    return kind_of(module) == "linear" and 4 * _outputs(module) >= _inputs(module)


def _vocabulary(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Rule]:
    """The embedding of tokens, wherever it stands, and the head over the same entries."""
    outside = {name: m for name, m in modules.items() if not _in_block(name)}
    tables = {name: m for name, m in outside.items() if isinstance(m, nn.Embedding)}
    known = [m for m in (_ask(model, "get_input_embeddings"),) if isinstance(m, nn.Embedding)]
    if not known and tables:
        largest = max(tables.values(), key=lambda m: m.num_embeddings)
        known = [largest]
    if not known:
        return {}
    weights, size = {id(m.weight) for m in known}, max(m.num_embeddings for m in known)
    plan = {name: Rule("embedding_rowwise") for name, m in tables.items() if id(m.weight) in weights}
    head = _ask(model, "get_output_embeddings")
    for name, m in outside.items():
        fits = kind_of(m) == "linear" and _outputs(m) == size and (m is head or head is None)
        if fits or (kind_of(m) == "linear" and id(m.weight) in weights):
            plan[name] = Rule("vocabulary")
    return plan


def _ask(model: nn.Module, question: str) -> nn.Module | None:
    """What a model of transformers says; None of others, or where it does not know."""
    try:
        answer = getattr(model, question)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return answer if isinstance(answer, nn.Module) else None
