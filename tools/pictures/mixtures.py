"""Pictures of mixtures of experts: the way of a token, and the groups of eight ranks; ``concepts.py`` writes them."""

from __future__ import annotations

from pictures.canvas import BLUE, GREEN, GREY, ORANGE, VIOLET, Canvas

TOKENS = {"a": (0, (1, 2)), "b": (0, (0, 1)), "c": (1, (2, 3)), "d": (1, (1, 3))}
"""Home rank and chosen experts of each token, by name; of four experts each of two ranks has two."""

RANKS, PER_RANK = 2, 2
COLOURS = dict(zip(TOKENS, (BLUE, GREEN, ORANGE, VIOLET), strict=True))


def experts() -> str:
    """Return what happens to four tokens of two ranks in a layer of four experts."""
    canvas, left, wide = Canvas(392), (62.0, 226.0), 146.0
    for rank in range(RANKS):
        canvas.text(left[rank] + wide / 2, 18, f"rank {rank}", 12, "middle")
    for y, *lines in (
        (44, "tokens"),
        (80, "router"),
        (162, "rows"),
        (220, "experts"),
        (296, "results"),
        (339, "sum over", "ranks"),
    ):
        for number, line in enumerate(lines):
            canvas.text(8, float(y) + 13 * number, str(line))
    for rank in range(RANKS):
        x, mine = left[rank], [name for name, (home, _) in TOKENS.items() if home == rank]
        for place, name in enumerate(mine):
            centre = x + 37 + 72 * place
            canvas.box(centre - 12, 28, 24, 22, COLOURS[name], name)
            canvas.arrow(centre, 50, centre, 64)
            first, second = TOKENS[name][1]
            canvas.box(x + 2 + 72 * place, 64, 70, 24, GREY, f"{first} and {second}")
            canvas.arrow(centre, 88, centre, 104)
        canvas.box(x, 186, wide, 84, "#fff")
        arrived = [name for name, (_, choices) in TOKENS.items() if any(one // PER_RANK == rank for one in choices)]
        for place, name in enumerate(arrived):
            start = left[TOKENS[name][0]] + 37 + 72 * list(TOKENS).index(name) % 144
            end = x + 24 + 49 * place
            canvas.arrow(start, 126, end, 148)
            canvas.box(end - 12, 148, 24, 20, COLOURS[name], name)
            canvas.arrow(end, 168, end, 186)
        for local in range(PER_RANK):
            expert = PER_RANK * rank + local
            canvas.box(x + 6, 192 + 38 * local, 60, 32, GREY, f"expert {expert}")
            chosen = [name for name, (_, choices) in TOKENS.items() if expert in choices]
            for place, name in enumerate(chosen):
                canvas.box(x + 72 + 24 * place, 198 + 38 * local, 21, 20, COLOURS[name], name)
        canvas.arrow(x + wide / 2, 270, x + wide / 2, 280)
        canvas.arrow(x + wide / 2, 304, x + wide / 2, 330)
        for place, name in enumerate(mine):
            canvas.box(x + 2 + 72 * place, 330, 70, 22, COLOURS[name], f"{name}: sum")
    canvas.box(left[0], 104, left[1] + wide - left[0], 22, VIOLET, "all-to-all: counts, then rows and weights")
    canvas.box(left[0], 280, left[1] + wide - left[0], 24, VIOLET, "all-to-all: one row back for each row that came")
    canvas.text(8, 370, "b and c have all their experts at home. a and d have one on", 10)
    canvas.text(8, 384, "the other rank too, and are sent there once.", 10)
    return canvas.svg("Tokens travel to the ranks of their experts, and the results travel home")


SIZES = {"data": 2, "context": 2, "tensor": 2}
EXPERT_RANKS, EXPERT_COUNT = 4, 8
HUES = (BLUE, ORANGE, GREEN, VIOLET)


def expert_groups() -> str:
    """Return the groups of eight ranks: data 2 x context 2 x tensor 2, with four ranks for eight experts."""
    canvas, left, wide = Canvas(262), 86.0, 36.0
    count = EXPERT_COUNT // EXPERT_RANKS
    canvas.text(8, 25, "rank", 12)
    sizes = SIZES | {"expert": EXPERT_RANKS}
    rows = {axis: 38 + 26 * number for number, axis in enumerate(SIZES)} | {"expert": 126, "expert_data": 152}
    for axis, y in rows.items():
        canvas.text(8, y + 15, f"{axis} {sizes.get(axis, '')}".strip())
    canvas.text(8, 193, "experts")
    for rank in range(8):
        x, place = left + wide * rank, places(rank)
        expert, group = place["expert"], place["expert_data"]
        fills = {"expert": (GREY, "#fff")[group], "expert_data": HUES[expert]}
        canvas.box(x, 10, wide - 2, 22, GREY, str(rank), 12)
        for axis, y in rows.items():
            canvas.box(x, y, wide - 2, 22, fills.get(axis, "#fff"), str(place[axis]))
        canvas.box(x, 178, wide - 2, 22, HUES[expert], f"{count * expert}, {count * expert + 1}")
    canvas.text(8, 222, "Ranks 0-3 and 4-7 exchange rows: each four have all experts.", 10)
    canvas.text(8, 236, "Ranks of one colour have the same experts: their gradients are", 10)
    canvas.text(8, 250, "summed, and ZeRO shards them over these ranks.", 10)
    return canvas.svg("Groups of eight ranks: four neighbours share the experts, ranks of one colour have the same")


def places(rank: int) -> dict[str, int]:
    """Return a rank's place along every axis; the last axis of ``SIZES`` is innermost."""
    found, rest = {"expert": rank % EXPERT_RANKS, "expert_data": rank // EXPERT_RANKS}, rank
    for axis in reversed(SIZES):
        rest, found[axis] = divmod(rest, SIZES[axis])
    return found
