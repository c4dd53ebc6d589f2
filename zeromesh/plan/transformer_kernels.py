"""Operations of a transformer's parts, by kernel: the forward, the gradients of inputs and those of parameters.

Bytes are those of 16-bit activations. A product of T rows is counted with 2 T k n operations, attention over a causal
mask with half of its products where the kernel is fused, as that skips the masked half.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from zeromesh.plan.cost import Divided, KernelWork, WorkKind

BYTES = 2  # of an element


class TransformerSizes(Protocol):
    """Sizes that the kernels follow from; ``TransformerShape`` has them."""

    @property
    def hidden(self) -> int:
        """Width of the stream between layers."""

    @property
    def heads(self) -> int:
        """Heads of queries."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""

    @property
    def query_width(self) -> int:
        """Width of all heads together."""

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads, and of the values."""

    @property
    def mlp_width(self) -> int:
        """Width of the MLP."""

    @property
    def gated(self) -> bool:
        """True for three matrices in the MLP."""

    @property
    def positions(self) -> int:
        """Learned positions; 0 for rotary ones."""

    @property
    def dropout(self) -> bool:
        """True if elements are dropped."""

    @property
    def fused_attention(self) -> bool:
        """True if scores are not written to memory."""


class Kernels(NamedTuple):
    """Kernels of one unit in each of its passes."""

    forward: tuple[KernelWork, ...]
    input: tuple[KernelWork, ...]  # of the gradients of inputs
    weight: tuple[KernelWork, ...]  # of the gradients of parameters


def block_kernels(
    shape: TransformerSizes, micro_batch: int, sequence: int, context: int = 1, causal: bool = True
) -> Kernels:
    """Return the kernels of a block, for ``micro_batch`` samples of which a rank has ``sequence / context`` tokens."""
    hidden, query, key, width = shape.hidden, shape.query_width, shape.key_width, shape.mlp_width
    tokens = micro_batch * sequence // context
    products = [
        (tokens, query + 2 * key, hidden, "columns"),
        (tokens, hidden, query, "sums"),
        (tokens, width * (2 if shape.gated else 1), hidden, "columns"),
        (tokens, hidden, width, "sums"),
    ]
    forward = [_product(*product) for product in products]
    inputs = [_product(rows, sums, columns, _OTHER[split]) for rows, columns, sums, split in products]
    # Sums run over tokens; what was split of the product is a dim of the gradient.
    weights = [_weight(*product) for product in products]
    attention, attention_back = _attention(shape, micro_batch, sequence, context, causal)
    masks = tokens * hidden if shape.dropout else 0
    # Two norms, each read once and written once, and two sums with what goes around them.
    around = [_moving(WorkKind.NORM, tokens=2 * BYTES * tokens * hidden, count=2),
              _moving(WorkKind.ELEMENTWISE, tokens=3 * BYTES * tokens * hidden + masks, count=2)]  # fmt: skip
    around_back = [_moving(WorkKind.NORM, tokens=4 * BYTES * tokens * hidden, count=2)]
    if shape.dropout:
        around_back.append(_moving(WorkKind.ELEMENTWISE, tokens=2 * BYTES * tokens * hidden + masks, count=2))
    reads = 2 if shape.gated else 1
    bend = _moving(WorkKind.ELEMENTWISE, split=(reads + 1) * BYTES * tokens * width)
    bend_back = _moving(WorkKind.ELEMENTWISE, split=(2 * reads + 1) * BYTES * tokens * width)
    extra = []
    if not shape.positions:  # rotary: queries and keys are read and written
        extra = [_moving(WorkKind.ELEMENTWISE, split=2 * BYTES * tokens * (query + key))]
    return Kernels(
        (*forward, *attention, *around, bend, *extra),
        (*inputs, *attention_back, *around_back, bend_back, *extra),
        tuple(weights),
    )


def embedding_kernels(shape: TransformerSizes, micro_batch: int, sequence: int, context: int = 1) -> Kernels:
    """Return the kernels of the embedding."""
    tokens = micro_batch * sequence // context
    rows = BYTES * tokens * shape.hidden
    tables = 2 if shape.positions else 1
    look = _moving(WorkKind.LOOKUP, tokens=(1 + tables) * rows)
    # Gradients of the rows that were looked up are added into a table.
    return Kernels((look,), (), (_moving(WorkKind.LOOKUP, tokens=(1 + 2 * tables) * rows),))


def head_kernels(shape: TransformerSizes, micro_batch: int, sequence: int, context: int = 1) -> Kernels:
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


_OTHER = {"columns": "sums", "sums": "columns"}  # the gradient of an input sums over what the product had as columns


def _product(rows: int, columns: int, sums: int, split: str) -> KernelWork:
    flops = Divided(split=2.0 * rows * columns * sums)
    taken, made, matrix = (float(BYTES * amount) for amount in (rows * sums, rows * columns, columns * sums))
    # The matrix is divided in either case; so is the product's result by columns, and its input by sums.
    if split == "columns":
        moved = Divided(split=matrix + made, whole=taken)
    else:
        moved = Divided(split=matrix + taken, whole=made)
    return KernelWork(WorkKind.PRODUCT, flops, moved, (rows, columns, sums), split)


def _weight(rows: int, columns: int, sums: int, split: str) -> KernelWork:
    """Return the product that gives the gradient of a product's matrix: (sums x rows) times (rows x columns)."""
    forward = _product(rows, columns, sums, split)
    shape = (sums, columns, rows) if split == "columns" else (columns, sums, rows)
    return KernelWork(WorkKind.PRODUCT, forward.flops, forward.moved, shape, "columns")


def _moving(kind: WorkKind, split: float = 0.0, tokens: float = 0.0, count: int = 1) -> KernelWork:
    # Few operations on each element: memory bounds them.
    return KernelWork(kind, Divided(split=split / BYTES, tokens=tokens / BYTES), Divided(split, tokens), count=count)


def _attention(
    shape: TransformerSizes, micro_batch: int, sequence: int, context: int, causal: bool
) -> tuple[list[KernelWork], list[KernelWork]]:
    """Return the kernels between queries, keys, values and the output, forward and backward."""
    heads, query, key = shape.heads, shape.query_width, shape.key_width
    tokens = micro_batch * sequence // context
    flops = 4.0 * tokens * sequence * query
    if shape.fused_attention:
        flops *= 0.5 if causal else 1.0
        moved = float(BYTES * 2 * tokens * (query + key))
        whole = KernelWork(WorkKind.ATTENTION, Divided(split=flops), Divided(split=moved))
        # The backward computes the scores again: five products instead of two. Those beyond four are no operations of
        # the model; their time is in the rate of the kernel.
        whole_back = KernelWork(WorkKind.ATTENTION, Divided(split=2 * flops), Divided(split=2.5 * moved))
        return [whole], [whole_back]
    scores = float(micro_batch * heads * (sequence // context) * sequence)
    mask = 1 if shape.dropout else 0
    # Scores are written by a product, read and written by the softmax and by the dropout, and read by a product.
    forward_bytes = scores * (8 + (4 + mask if shape.dropout else 0))
    back_bytes = scores * (14 + (4 + mask if shape.dropout else 0))
    head = query // heads
    product = (sequence // context, sequence, head)
    each = micro_batch * heads
    near = Divided(split=2.0 * each * product[0] * product[1] * product[2])
    moved_each = Divided(split=float(BYTES * each * head * (product[0] + product[1])))
    forward = [
        KernelWork(WorkKind.ATTENTION, near, moved_each, product, "", 2),
        _moving(WorkKind.ATTENTION, split=forward_bytes),
    ]
    back = [
        KernelWork(WorkKind.ATTENTION, near, moved_each, product, "", 4),
        _moving(WorkKind.ATTENTION, split=back_bytes),
    ]
    return forward, back
