"""Sizes of a transformer, and its cost by formula where no model is at hand to trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from zeromesh.apps.plan.cost.cost import (
    NONE,
    Divided,
    ExpertCost,
    KernelWork,
    ModelCost,
    Recompute,
    UnitCost,
    WorkKind,
)
from zeromesh.apps.plan.predict.conventions import PLAIN, ActivationRule

BYTES = 2  # of an element of activations


class LatentAttention(NamedTuple):
    """Widths of attention whose queries, keys and values are made from narrow latent ones (DeepSeek-V2)."""

    query_rank: int  # of the latent queries; 0: there are none
    key_rank: int  # of what keys and values are made from
    plain: int  # elements of a head without positions
    rotary: int  # elements of a head with positions; the keys of all heads share them
    value: int  # elements of a head's value


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a decoder, or of an encoder of the same form."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int = 0  # 0: as many as ``heads``
    width: int = 0  # of the MLP; 0: four times ``hidden``
    head_width: int = 0  # 0: ``hidden`` / ``heads``
    gated: bool = False  # three matrices in the MLP instead of two, as in Llama
    biases: bool = True  # of linear layers and norms; false for RMSNorm without biases, as in Llama
    tied: bool = True  # the output layer is the embedding
    positions: int = 0  # learned ones; 0: none, as with rotary embeddings
    dropout: bool = False  # masks of dropout are kept for the backward
    fused_attention: bool = True  # scores are not kept for the backward
    name: str = "transformer"
    experts: int = 0  # of a block; 0: its MLP is dense
    chosen: int = 0  # experts of a token
    expert_width: int = 0
    shared_width: int = 0  # of the experts that all tokens use, together
    dense_layers: int = 0  # first blocks whose MLP is dense
    latent: LatentAttention | None = None
    window: int = 0  # tokens that every second layer attends to; 0: all
    extra_heads: int = 0  # further blocks that predict further tokens, each with the output layer of the model

    @property
    def query_width(self) -> int:
        """Width of all heads together."""
        if self.latent is not None:
            return self.heads * (self.latent.plain + self.latent.rotary)
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads."""
        if self.latent is not None:
            return self.query_width
        return self.query_width // self.heads * (self.kv_heads or self.heads)

    @property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        return self.heads * self.latent.value if self.latent is not None else self.key_width

    @property
    def result_width(self) -> int:
        """Width of attention's result."""
        return self.heads * self.latent.value if self.latent is not None else self.query_width

    @property
    def projections(self) -> tuple[tuple[int, int, str], ...]:
        """Columns, sums and split dim of the products that make queries, keys and values."""
        if (latent := self.latent) is None:
            return ((self.query_width + 2 * self.key_width, self.hidden, "columns"),)
        query = ((self.query_width, self.hidden, "columns"),)
        if latent.query_rank:
            query = ((latent.query_rank, self.hidden, ""), (self.query_width, latent.query_rank, "columns"))  # type: ignore[assignment]
        narrow = (latent.key_rank + latent.rotary, self.hidden, "")
        return *query, narrow, (self.heads * (latent.plain + latent.value), latent.key_rank, "columns")

    def is_sparse(self, layer: int) -> bool:
        """Return whether a block has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def matrices(self, sparse: bool, active: bool = False) -> int:
        """Return the elements of a block's matrices, or of those that one token uses."""
        attention = sum(columns * sums for columns, sums, _ in self.projections) + self.result_width * self.hidden
        gates = 3 if self.gated else 2
        if not sparse:
            return attention + gates * self.hidden * self.mlp_width
        experts = self.chosen if active else self.experts
        width = experts * self.expert_width + self.shared_width
        return attention + gates * self.hidden * width + self.experts * self.hidden

    @property
    def all_layers(self) -> int:
        """Number of blocks, with those of further heads."""
        return self.layers + self.extra_heads

    @property
    def mlp_width(self) -> int:
        """Width of the MLP."""
        return self.width or 4 * self.hidden


@dataclass(frozen=True)
class TransformerCost:
    """Cost of a transformer by formula: Korthikanti et al., 2022, for any attention, MLP, norm and framework.

    Amounts of activations are those of 16-bit training.
    """

    shape: TransformerShape
    rule: ActivationRule = PLAIN

    @property
    def name(self) -> str:
        """Name of the shape."""
        return self.shape.name

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        """Return the cost of a micro-batch; ``context`` ranks share each sequence."""
        return _cost(self.shape, self.rule, micro_batch, sequence, context)


@lru_cache(maxsize=256)
def _cost(shape: TransformerShape, rule: ActivationRule, micro_batch: int, sequence: int, context: int) -> ModelCost:
    tokens = micro_batch * sequence / context
    kinds = {}
    for sparse in {shape.is_sparse(layer) for layer in range(shape.all_layers)}:
        block = _block(shape, rule, tokens, sequence / context, context, sparse)
        inside = block_kernels(shape, micro_batch, sequence, context, sparse)
        # Keys and values go round the ranks that share a sequence.
        exchanged = Divided(split=2 * tokens * (shape.key_width + shape.value_width))
        kinds[sparse] = replace(block, exchanged=exchanged, **inside._asdict())
    blocks = [replace(kinds[shape.is_sparse(layer)], name=f"blocks.{layer}") for layer in range(shape.all_layers)]
    first, last = _embedding(shape, tokens), _head(shape, rule, tokens)
    first = replace(first, **embedding_kernels(shape, micro_batch, sequence, context)._asdict())
    # The sums of tensor ranks: of the rows that each has looked up, and of the gradient of the head's input.
    first, last = replace(first, joins=2 * tokens * shape.hidden), replace(last, joins=2 * tokens * shape.hidden)
    if rule.head:
        times, parts = 1 + shape.extra_heads, head_kernels(shape, micro_batch, sequence, context)
        parts = Kernels(*(tuple(replace(work, count=times * work.count) for work in works) for works in parts))
        last = replace(last, **parts._asdict())
    else:
        first = replace(first, saved={})
    units = (first, *blocks, last)
    note = "by formula, from the sizes of a transformer"
    return ModelCost(shape.name, micro_batch, sequence, context, units, exact=False, note=note)


def _embedding(shape: TransformerShape, tokens: float) -> UnitCost:
    hidden = shape.hidden
    mask = Divided(tokens=tokens * hidden) if shape.dropout else NONE
    parameters = Divided(split=shape.vocabulary * hidden, whole=shape.positions * hidden)
    return UnitCost(
        "embedding",
        False,
        parameters,
        resident=parameters,
        largest=Divided(split=shape.vocabulary * hidden),
        # Token numbers of 8 bytes; they are whole on every rank.
        saved=dict.fromkeys(Recompute, mask.plus(Divided(whole=8 * tokens))),
        output=Divided(tokens=2 * tokens * hidden),
    )


def _block(
    shape: TransformerShape, rule: ActivationRule, tokens: float, length: float, context: int, sparse: bool = False
) -> UnitCost:
    hidden, query, key, width = shape.hidden, shape.query_width, shape.key_width, shape.mlp_width
    value, result, experts = shape.value_width, shape.result_width, 0
    if sparse:
        width, experts = shape.shared_width, shape.chosen * shape.expert_width
    matrices = shape.matrices(sparse)
    # Biases of layers whose outputs are divided are divided, too; the others, and norms, are whole.
    biases = Divided(split=query + key + value + width, whole=2 * hidden) if shape.biases else NONE
    norms = Divided(whole=(4 if shape.biases else 2) * hidden)
    stream = Divided(tokens=2 * tokens * hidden)  # 16-bit activations between layers
    kept_heads = query + (2 * query if rule.repeated_heads else key + value)
    lengths = 4 * tokens * shape.heads  # fp32 log-sum-exp of a fused kernel
    scores = NONE
    if not shape.fused_attention:
        # Softmax in 16 bits; with dropout a mask of one byte and what it lets through, besides.
        scores, lengths = Divided(split=(5 if shape.dropout else 2) * shape.heads * tokens * length * context), 0
    # Queries, keys and values, what they are made from, and the output, which the next layer keeps.
    inside = 2 * tokens * (kept_heads + result)
    if shape.latent is not None:
        inside += 4 * tokens * (shape.latent.query_rank + shape.latent.key_rank)  # inputs and outputs of two norms
    if rule.context_output and context > 1:
        inside += 2 * tokens * result
    gates = 2 if shape.gated else 1
    inner = width + experts
    mlp = 2 * tokens * inner * (gates + (1 if shape.gated and rule.activation_output else 0) + 1)
    if sparse:
        # Rows in the order of the experts; their results, unless weights come before the last product; the scores.
        rows = 2 * tokens * hidden * shape.chosen
        mlp += rows * (2 if rule.expert_results else 1) + 4 * tokens * shape.experts
    # Dropout of both sublayers keeps a byte an element.
    masks = Divided(tokens=2 * tokens * hidden) if shape.dropout else NONE
    norm_kept, gradient = Divided(tokens=2 * rule.norm_kept * tokens * hidden), stream  # two norms
    if rule.gathered_inputs:
        gathered = Divided(tokens=-2 * tokens * hidden, whole=2 * tokens * hidden)  # beyond a rank's own part
        norm_kept, gradient = norm_kept.plus(gathered.times(2)), stream.plus(gathered)
    rest = Divided(split=inside + lengths + mlp).plus(masks).plus(norm_kept)
    selective = rest
    if rule.every_second_product:
        # Of query, key, value, output, gate, up and down: the first and each second one after it, attention's result,
        # and the block's input.
        last = 2 * tokens * hidden if rule.last_product else 0.0
        products = Divided(split=2 * tokens * (query + key + inner), tokens=last)
        selective = products.plus(Divided(split=2 * tokens * result + lengths)).plus(stream)
    # Queries, keys, values and what the MLP makes of its input; both sublayers' results, before tensor ranks sum them.
    results = Divided(split=2 * tokens * (query + key + value + inner * gates), whole=4 * tokens * hidden)
    results = results.plus(Divided(split=2 * tokens * result + lengths if shape.fused_attention else 0.0))
    # The MLP's backward: the gradient that arrives, that of the last product's input, and that of the first product's
    # output, as the last product's input, which was kept, has been freed.
    widest = max(width, experts)
    backward = gradient.plus(Divided(split=2 * tokens * widest * gates))
    if rule.reordered_sums:  # the gradient of the gathered input and its copy, beside that of one product's output
        backward = Divided(split=2 * tokens * widest, whole=4 * tokens * hidden)
    if sparse:  # gradients of the experts' rows, and of these on their way
        backward = backward.plus(Divided(split=4 * tokens * hidden * shape.chosen))
    if rule.context_gathers and context > 1:
        backward = backward.plus(Divided(split=2 * tokens * context * (kept_heads - query)))
    return UnitCost(
        "block",
        True,
        Divided(split=float(matrices)).plus(biases).plus(norms),
        largest=Divided(split=float(hidden * (shape.experts * shape.expert_width if sparse else width) * gates)),
        saved={
            Recompute.NONE: rest.plus(scores),
            Recompute.SELECTIVE: selective,
            Recompute.BLOCKS: stream,
            Recompute.PRODUCTS: stream.plus(results),
        },
        output=stream,
        forward_peak=stream.plus(Divided(split=2 * tokens * widest)),
        backward_peak=backward,
        joins=4 * tokens * hidden,
        experts=_experts(shape, tokens) if sparse else None,
    )


def _experts(shape: TransformerShape, tokens: float) -> ExpertCost:
    elements = shape.experts * shape.expert_width * shape.hidden * (3 if shape.gated else 2)
    return ExpertCost(float(elements), shape.experts, shape.chosen, tokens, BYTES * float(shape.hidden))


def _head(shape: TransformerShape, rule: ActivationRule, tokens: float) -> UnitCost:
    hidden, vocabulary = shape.hidden, shape.vocabulary
    norm = Divided(whole=(2 if shape.biases else 1) * hidden)
    table = Divided(split=float(vocabulary * hidden))
    parameters = norm if shape.tied else norm.plus(table)
    if not rule.head:
        return UnitCost("head", False, parameters, resident=parameters, shared=table if shape.tied else NONE)
    stream = Divided(tokens=2 * tokens * hidden)
    logits = Divided(whole=tokens * vocabulary) if rule.whole_logits else Divided(split=tokens * vocabulary)
    # Sequence parallelism gathers the whole input for the product, in the forward and again in the backward.
    stream_size = 2 * tokens * hidden
    gathered = Divided(tokens=-stream_size, whole=2 * stream_size)  # its own and the gradient of it
    saved = stream.times(2).plus(logits.times(rule.logits_kept))
    return UnitCost(
        "head",
        False,
        parameters,
        resident=parameters,
        largest=table,
        shared=table if shape.tied else NONE,
        saved=dict.fromkeys(Recompute, saved),
        output=Divided(whole=4.0),
        forward_peak=logits.times(max(0.0, rule.logits_forward - rule.logits_kept)),
        backward_peak=logits.times(max(0.0, rule.logits_backward - rule.logits_kept)).plus(gathered),
    )


# Operations by kernel: 2 T k n for a product of T rows; half of attention's products over a causal mask where its
# kernel is fused, as that skips the masked half.


class Kernels(NamedTuple):
    """Kernels of one unit in each of its passes."""

    forward: tuple[KernelWork, ...]
    input: tuple[KernelWork, ...]  # of the gradients of inputs
    weight: tuple[KernelWork, ...]  # of the gradients of parameters


def block_kernels(
    shape: TransformerShape, micro_batch: int, sequence: int, context: int = 1, sparse: bool = False
) -> Kernels:
    """Return the kernels of a block, for ``micro_batch`` samples of which a rank has ``sequence / context`` tokens."""
    hidden, query, key, width = shape.hidden, shape.query_width, shape.key_width, shape.mlp_width
    tokens, gates = micro_batch * sequence // context, 2 if shape.gated else 1
    products = [(tokens, *projection, 0) for projection in shape.projections]
    products.append((tokens, hidden, shape.result_width, "sums", 0))
    if sparse:
        width, rows = shape.shared_width, tokens * shape.chosen
        products += [
            (tokens, shape.experts, hidden, "", 0),
            (rows, shape.expert_width * gates, hidden, "columns", shape.experts),
            (rows, hidden, shape.expert_width, "sums", shape.experts),
        ]
    if width:
        products += [(tokens, width * gates, hidden, "columns", 0), (tokens, hidden, width, "sums", 0)]
    forward = [_product(*product) for product in products]
    inputs = [_product(rows, sums, columns, _OTHER[split], groups) for rows, columns, sums, split, groups in products]
    # Sums run over tokens; what was split of the product is a dim of the gradient.
    weights = [_weight(*product) for product in products]
    attention, attention_back = _attention(shape, micro_batch, sequence, context)
    masks = tokens * hidden if shape.dropout else 0
    # Two norms, each read once and written once, and two sums with what goes around them.
    around = [
        _moving(WorkKind.NORM, tokens=2 * BYTES * tokens * hidden, count=2),
        _moving(WorkKind.ELEMENTWISE, tokens=3 * BYTES * tokens * hidden + masks, count=2),
    ]
    around_back = [_moving(WorkKind.NORM, tokens=4 * BYTES * tokens * hidden, count=2)]
    if shape.dropout:
        around_back.append(_moving(WorkKind.ELEMENTWISE, tokens=2 * BYTES * tokens * hidden + masks, count=2))
    inner = width + (shape.chosen * shape.expert_width if sparse else 0)
    bend = _moving(WorkKind.ELEMENTWISE, split=(gates + 1) * BYTES * tokens * inner)
    bend_back = _moving(WorkKind.ELEMENTWISE, split=(2 * gates + 1) * BYTES * tokens * inner)
    if sparse:
        # Rows are put into the order of the experts, and their results are weighted and summed; scores are in fp32.
        moved = 2 * BYTES * tokens * hidden * (shape.chosen + 1) + 20 * tokens * shape.experts
        around.append(_moving(WorkKind.LOOKUP, split=moved))
        around_back.append(_moving(WorkKind.LOOKUP, split=moved))
    # Rotary positions: queries and keys are read and written.
    extra = () if shape.positions else (_moving(WorkKind.ELEMENTWISE, split=2 * BYTES * tokens * (query + key)),)
    back = (*inputs, *attention_back, *around_back, bend_back, *extra)
    return Kernels((*forward, *attention, *around, bend, *extra), back, tuple(weights))


def embedding_kernels(shape: TransformerShape, micro_batch: int, sequence: int, context: int = 1) -> Kernels:
    """Return the kernels of the embedding."""
    tokens = micro_batch * sequence // context
    rows = BYTES * tokens * shape.hidden
    tables = 2 if shape.positions else 1
    look = _moving(WorkKind.LOOKUP, tokens=(1 + tables) * rows)
    # Gradients of the rows that were looked up are added into a table.
    return Kernels((look,), (), (_moving(WorkKind.LOOKUP, tokens=(1 + 2 * tables) * rows),))


def head_kernels(shape: TransformerShape, micro_batch: int, sequence: int, context: int = 1) -> Kernels:
    """Return the kernels of the last norm, the output layer and the cross entropy."""
    tokens = micro_batch * sequence // context
    hidden, words = shape.hidden, shape.vocabulary
    norm = _moving(WorkKind.NORM, tokens=2 * BYTES * tokens * hidden)
    norm_back = _moving(WorkKind.NORM, tokens=4 * BYTES * tokens * hidden)
    # In fp32: a cast (2 + 4), a softmax that reads twice and writes (12); its gradient (8) and a cast back (6).
    loss = _moving(WorkKind.LOSS, split=18.0 * tokens * words)
    loss_back = _moving(WorkKind.LOSS, split=14.0 * tokens * words)
    return Kernels(
        (norm, _product(tokens, words, hidden, "columns"), loss),
        (loss_back, _product(tokens, hidden, words, "sums"), norm_back),
        (_weight(tokens, words, hidden, "columns"),),
    )


_OTHER = {
    "columns": "sums",
    "sums": "columns",
    "": "",
}  # the gradient of an input sums over what the product had as columns


def _product(rows: int, columns: int, sums: int, split: str, groups: int = 0) -> KernelWork:
    flops = 2.0 * rows * columns * sums
    taken, result, matrix = (float(BYTES * amount) for amount in (rows * sums, rows * columns, columns * sums))
    matrix *= groups or 1
    if not split:  # whole on each tensor rank
        return KernelWork(
            WorkKind.PRODUCT, Divided(tokens=flops), Divided(tokens=matrix + taken + result), (rows, columns, sums)
        )
    # The matrix is divided in either case; so is the product's result by columns, and its input by sums.
    moved = Divided(split=matrix + result, whole=taken) if split == "columns" else Divided(matrix + taken, whole=result)
    return KernelWork(WorkKind.PRODUCT, Divided(split=flops), moved, (rows, columns, sums), split, groups=groups)


def _weight(rows: int, columns: int, sums: int, split: str, groups: int = 0) -> KernelWork:
    """Return the product that gives the gradient of a product's matrix: (sums x rows) times (rows x columns)."""
    forward = _product(rows, columns, sums, split, groups)
    if groups:
        return forward  # the rows of each expert are summed: as many operations as forward
    shape = (sums, columns, rows) if split == "columns" else (columns, sums, rows)
    return KernelWork(WorkKind.PRODUCT, forward.flops, forward.moved, shape, "columns" if split else "")


def _moving(kind: WorkKind, split: float = 0.0, tokens: float = 0.0, count: int = 1) -> KernelWork:
    # Few operations on each element: memory bounds them.
    return KernelWork(kind, Divided(split=split / BYTES, tokens=tokens / BYTES), Divided(split, tokens), count=count)


def _attention(
    shape: TransformerShape, micro_batch: int, sequence: int, context: int
) -> tuple[list[KernelWork], list[KernelWork]]:
    """Return the kernels between queries, keys, values and the output, forward and backward."""
    heads, query, key = shape.heads, shape.query_width, shape.key_width
    tokens = micro_batch * sequence // context
    reached = (1.0 + min(1.0, 2 * shape.window / sequence)) / 2 if shape.window else 1.0  # of the scores
    flops = 2.0 * tokens * sequence * (query + shape.result_width) * reached
    if shape.fused_attention:
        moved = float(BYTES * tokens * (query + key + shape.value_width + shape.result_width))
        # Its kernel skips the half of the scores that a causal mask hides.
        kernel = KernelWork(WorkKind.ATTENTION, Divided(split=flops / 2), Divided(split=moved))
        # The backward computes the scores again: five products instead of two. Those beyond four are no operations of
        # the model; their time is in the rate of the kernel.
        kernel_back = KernelWork(WorkKind.ATTENTION, Divided(split=flops), Divided(split=2.5 * moved))
        return [kernel], [kernel_back]
    length, head = sequence // context, query // heads
    scores = float(micro_batch * heads * length * sequence)
    # Scores are written by a product, read and written by the softmax and by the dropout, and read by a product.
    dropped = 5 if shape.dropout else 0
    product = KernelWork(
        WorkKind.ATTENTION,
        Divided(split=2.0 * scores * head),
        Divided(split=float(BYTES * micro_batch * query * (length + sequence))),
        (length, sequence, head),
        count=2,
    )
    around, around_back = (_moving(WorkKind.ATTENTION, split=scores * (each + dropped)) for each in (8, 14))
    return [product, around], [replace(product, count=4), around_back]
