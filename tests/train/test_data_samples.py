"""From token files to batches: orders, windows, packing, blends, and resuming by counting."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from zeromesh.apps.train.data.indexed import IndexedWriter, file_of
from zeromesh.apps.train.data.ordered_loader import (
    Batch,
    Share,
    Stream,
    evaluation_batches,
    open_samples,
    training_batches,
    training_samples,
)
from zeromesh.apps.train.data.sample_order import Blend, Permutation, pack, seed_of
from zeromesh.apps.train.data.token_store import PreparedData, TokenSet

PAD = 7777


def write(prefix: Path, documents: list[np.ndarray], masks: list[np.ndarray] | None = None) -> TokenSet:
    ends = np.ones(len(documents), dtype=bool)
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    for path, dtype, arrays in ((prefix, "<i4", documents), (file_of(prefix, ".mask"), "u1", masks or [])):
        if arrays:
            with IndexedWriter(path, np.dtype(dtype)) as writer:
                writer.add(np.concatenate(arrays), lengths, ends)
    tokens = int(lengths.sum())
    labels = tokens if masks is None else int(sum(mask[1:].sum() for mask in masks))
    return TokenSet(prefix, None, len(documents), tokens, labels, tokens, masks is not None, 0)


def prepared(*train: TokenSet, validation: tuple[TokenSet, ...] = (), **more: object) -> PreparedData:
    weights = more.pop("weights", (1.0,))
    return PreparedData(
        key="", train=train, validation=validation, vocabulary=8000, pad=PAD, capped=False, skipped=0, dropped=0,
        tokenizer=None, weights=weights, **more,
    )  # fmt: skip


def texts(sizes: list[int]) -> list[np.ndarray]:
    """Documents whose ids say which they are and where: ``100 * number + place``."""
    return [100 * number + np.arange(size) for number, size in enumerate(sizes)]


def records(sizes: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the same with masks: the first third is a prompt."""
    return texts(sizes), [(np.arange(size) >= size // 3).astype(np.uint8) for size in sizes]


SIZES = np.random.default_rng(5).integers(2, 40, 60).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_every_seed_gives_a_permutation(size: int) -> None:
    places = np.arange(size)
    orders = [Permutation(size, seed_of(5, epoch))[places] for epoch in range(3)]
    assert all(sorted(order) == list(places) for order in orders)
    assert all((Permutation(size, seed_of(5, 0))[places[n : n + 1]] == orders[0][n]).all() for n in range(size))
    if size > 60:
        assert not (orders[0] == orders[1]).all()
        assert not (orders[1] == orders[2]).all()
        assert np.abs(orders[0] - places).mean() > size / 5  # a third of the size is what chance gives


def test_the_order_is_the_same_on_every_machine() -> None:
    assert Permutation(10, 3)[np.arange(10)].tolist() == [8, 2, 5, 0, 6, 7, 4, 1, 9, 3]


def test_an_epoch_of_a_stream_is_its_documents_in_an_order_of_their_own_cut_in_windows(tmp_path: Path) -> None:
    part = write(tmp_path / "set", texts(SIZES))
    stream = Stream(part, 16, 3, PAD)
    assert stream.count == (part.tokens - 1) // 16
    lines = []
    for epoch in range(2):
        samples = [stream.sample(epoch * stream.count + n) for n in range(stream.count)]
        # Put the windows one after the other again: each goes on where another ended.
        after = {int(sample.tokens[0]): sample for sample in samples}
        assert len(after) == stream.count
        first = next(s for s in samples if s.tokens[0] not in {int(other.labels[-1]) for other in samples})
        line = [*first.tokens]
        while (sample := after.get(int(line[-1] if len(line) == 1 else first.labels[-1]))) is not None:
            line += [*sample.tokens]
            first = sample
        assert len(line) == 16 * stream.count
        numbers = [token // 100 for token in line if token % 100 == 0]
        for number in numbers[:-1]:  # the last one may be cut off
            at = line.index(100 * number)
            assert line[at : at + SIZES[number]] == [100 * number + n for n in range(SIZES[number])]
        lines.append(numbers)
        assert [s.tokens.tolist() for s in samples] != sorted(s.tokens.tolist() for s in samples)
    assert lines[0] != lines[1]
    assert lines[0] != sorted(lines[0])


def test_a_window_says_which_document_each_token_is_of_and_where(tmp_path: Path) -> None:
    part = write(tmp_path / "set", texts([5, 0, 4, 9]))
    sample = Stream(part, 8, 0, PAD).row(0)
    assert sample.tokens.tolist() == [0, 1, 2, 3, 4, 200, 201, 202]
    assert sample.labels.tolist() == [1, 2, 3, 4, 200, 201, 202, 203]
    assert sample.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert np.unique(sample.documents, return_inverse=True)[1].tolist() == [0] * 5 + [1] * 3
    second = Stream(part, 8, 0, PAD).row(1)
    assert second.positions.tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    third = Stream(part, 8, 0, PAD).row(2)
    assert third.tokens.tolist() == [307, *[PAD] * 7]
    assert third.labels.tolist() == [308, *[-100] * 7]
    assert third.positions.tolist() == [0, *range(7)]
    assert third.documents[0] != third.documents[1]


def test_only_chosen_documents_are_in_a_stream(tmp_path: Path) -> None:
    whole = write(tmp_path / "set", texts([10, 10, 10, 10]))
    np.save(tmp_path / "some.npy", np.array([1, 3]))
    part = TokenSet(whole.prefix, tmp_path / "some.npy", 2, 20, 20, 20, False, 0)
    seen = [token for n in range(3) for token in Stream(part, 6, 0, PAD).sample(n).tokens.tolist()]
    assert {token // 100 for token in seen} == {1, 3}


def test_packing_splits_no_record_and_leaves_little_space() -> None:
    sizes = np.random.default_rng(0).integers(1, 513, 5000)
    rows = pack(sizes, 512)
    filled = np.bincount(rows, weights=sizes)
    assert filled.max() <= 512
    assert (filled > 0).all()
    assert filled.mean() / 512 > 0.98
    assert (pack(sizes, 512) == rows).all()
    assert pack(np.array([512, 1, 511]), 512).tolist() == [0, 1, 1]
    assert len(pack(np.empty(0, dtype=np.int64), 8)) == 0


@pytest.mark.parametrize("packing", ["pack", "pad"])
def test_rows_have_every_record_once_with_labels_where_the_mask_says(tmp_path: Path, packing: str) -> None:
    sizes = SIZES
    documents, masks = records(sizes)
    part = write(tmp_path / "set", documents, masks)
    samples = open_samples(part, 64, 3, packing, PAD)
    assert samples.count == len(sizes) if packing == "pad" else samples.count < len(sizes) / 2
    for epoch in range(2):
        seen = []
        for n in range(samples.count):
            sample = samples.sample(epoch * samples.count + n)
            for document in np.unique(sample.documents):
                inside = sample.documents == document
                tokens, labels = sample.tokens[inside], sample.labels[inside]
                assert sample.positions[inside].tolist() == list(range(len(tokens)))
                if tokens[0] == PAD:
                    assert (tokens == PAD).all()
                    assert (labels == -100).all()
                    continue
                number = int(tokens[0]) // 100
                seen.append(number)
                assert tokens.tolist() == documents[number][:-1].tolist()
                wanted = np.where(masks[number][1:] == 1, documents[number][1:], -100)
                assert labels.tolist() == wanted.tolist()
        assert sorted(seen) == list(range(len(sizes)))
    orders = [[samples.sample(e * samples.count + n).tokens[0] for n in range(samples.count)] for e in range(2)]
    assert orders[0] != orders[1]


def test_a_record_that_is_longer_than_a_sample_is_refused(tmp_path: Path) -> None:
    part = write(tmp_path / "set", *records([9, 12]))
    open_samples(part, 11, 0, "pack", PAD)
    with pytest.raises(
        ValueError, match=r"document 1 has 12 tokens.*model\.sequence_length or hug.*_length = 10 holds 11"
    ):
        open_samples(part, 10, 0, "pack", PAD)


def rule(weights: tuple[float, ...], steps: int) -> list[int]:
    taken, chosen = [0] * len(weights), []
    for step in range(steps):
        behind = [weight * max(step, 1) - own for weight, own in zip(weights, taken, strict=True)]
        best = next(n for n, value in enumerate(behind) if value == max(behind))
        taken[best] += 1
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3)])
def test_a_blend_takes_what_is_most_behind_its_weight(weights: tuple[float, ...]) -> None:
    expected = rule(weights, 1000)
    chosen = Blend(weights, 0).take(1000)
    assert [part for part, _ in chosen] == expected
    for part, weight in enumerate(weights):
        assert [index for own, index in chosen if own == part] == list(range(expected.count(part)))
        assert abs(expected.count(part) - 1000 * weight) <= len(weights)
    for consumed in (1, 137, 999):
        assert Blend(weights, consumed).take(1000 - consumed) == chosen[consumed:]


def test_a_blend_of_equal_parts_begins_with_the_first() -> None:
    assert [part for part, _ in Blend((0.5, 0.5), 0).take(6)] == [0, 1, 0, 1, 0, 1]


def blend(tmp_path: Path) -> PreparedData:
    first = write(tmp_path / "first", texts(SIZES))
    sizes = SIZES[:30]
    documents, masks = records(sizes)
    second = write(tmp_path / "second", [document + 6000 for document in documents], masks)
    return prepared(first, second, weights=(0.6, 0.4))


def steps(whole: PreparedData, ranks: int, consumed: int, count: int, rows: int, micro_batches: int) -> list[list[int]]:
    shares = [Share(rank, ranks, rows, micro_batches) for rank in range(ranks)]
    streams = [training_batches(whole, 48, share, 7, consumed) for share in shares]
    found = []
    for _ in range(count):
        batch = [next(stream).tokens for _ in range(micro_batches) for stream in streams]
        found.append(torch.cat(batch).tolist())
    return found


def test_a_resume_at_any_sample_on_any_ranks_loses_and_doubles_nothing(tmp_path: Path) -> None:
    for whole in (blend(tmp_path), prepared(blend(tmp_path).train[0])):
        undisturbed = [row for step in steps(whole, 1, 0, 30, 12, 1) for row in step]
        assert len(undisturbed) == 360
        for consumed, ranks, rows, micro_batches in (
            (0, 2, 3, 2),
            (12, 3, 2, 2),
            (96, 1, 4, 3),
            (156, 3, 4, 1),
            (5, 2, 6, 1),
        ):
            again = [row for step in steps(whole, ranks, consumed, 10, rows, micro_batches) for row in step]
            assert again == undisturbed[consumed : consumed + 120]


def test_every_epoch_has_every_sample_once_over_the_ranks(tmp_path: Path) -> None:
    whole = prepared(blend(tmp_path).train[0])
    (samples,) = training_samples(whole, 48, 7)
    epochs = [row for step in steps(whole, 2, 0, samples.count, 1, 1) for row in step]
    for epoch in range(2):
        found = {tuple(row) for row in epochs[epoch * samples.count : (epoch + 1) * samples.count]}
        assert len(found) == samples.count


def test_batches_have_labels_and_where_they_are_asked_for_positions(tmp_path: Path) -> None:
    whole = blend(tmp_path)
    batch = next(training_batches(whole, 48, Share(0, 1, 3, 1), 0, 0))
    assert batch.positions is None
    assert batch.documents is None
    inside = prepared(*whole.train, weights=whole.weights, document_attention=True)
    attentive = next(training_batches(inside, 48, Share(0, 1, 3, 1), 0, 0))
    assert attentive.positions is not None
    assert attentive.documents is not None
    for tensor in (batch.tokens, batch.labels, attentive.positions, attentive.documents):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (3, 48)
    assert torch.equal(batch.tokens, attentive.tokens)
    moved = attentive.to("cpu")
    assert isinstance(moved, Batch)
    assert torch.equal(moved.documents, attentive.documents)
    assert batch.to("cpu").documents is None


def test_too_little_text_for_one_sample_is_refused(tmp_path: Path) -> None:
    part = write(tmp_path / "set", texts([50, 50]))
    with pytest.raises(
        ValueError,
        match=r"model\.sequence_length or huggingface\.sequence_length = 100 needs 101 tokens.*there are 100",
    ):
        next(training_batches(prepared(part), 100, Share(0, 1, 1, 1), 0, 0))
    assert next(training_batches(prepared(part), 99, Share(0, 1, 1, 1), 0, 0)).tokens.shape == (1, 99)


def test_batches_draw_no_random_numbers(tmp_path: Path) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    next(training_batches(blend(tmp_path), 48, Share(0, 1, 3, 1), 0, 0))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state()[1].tolist() == numpy_state


@pytest.mark.parametrize(
    ("count", "length", "rows", "ranks"), [(2, 4, 2, 1), (9, 4, 2, 1), (50, 4, 3, 2), (97, 8, 2, 3)]
)
def test_evaluation_has_every_token_but_the_first_as_a_label_once(tmp_path, count, length, rows, ranks) -> None:
    part = write(tmp_path / "set", [np.arange(1, count + 1)])
    shares = [
        list(evaluation_batches(prepared(validation=(part,)), length, rows, rank, ranks)) for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    seen = []
    for batch in (batch for share in shares for batch in share):
        assert batch.tokens.shape == batch.labels.shape == (rows, length)
        counted = batch.labels != -100
        assert torch.equal(batch.labels[counted], batch.tokens[counted] + 1)
        seen += batch.labels[counted].tolist()
    assert sorted(seen) == list(range(2, count + 1))


def test_evaluation_mixes_what_is_held_out_and_has_every_label_once(tmp_path: Path) -> None:
    both = blend(tmp_path).train
    whole = prepared(validation=both, document_attention=True)
    batches = list(evaluation_batches(whole, 48, 2, 0, 1))
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    assert int((labels != -100).sum()) == both[0].labels - 1 + both[1].labels
    early = torch.cat([batch.tokens.flatten() for batch in islice(batches, len(batches) // 4)])
    assert {bool(token >= 6000) for token in early[early != PAD].tolist()} == {True, False}
    assert list(evaluation_batches(prepared(), 48, 2, 0, 1)) == []
