"""Tensors are found and replaced in all containers, in the same order."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from zeromesh.base.containers import map_tensors, moved, tensors_of
from zeromesh.engine.batches import loss_of


def test_results_of_torch_are_containers() -> None:
    found = torch.randn(3, 4).max(0)
    assert [id(one) for one in tensors_of({"a": [found]})] == [id(found.values), id(found.indices)]
    mapped = map_tensors(found, lambda one: one + 1)
    assert type(mapped) is type(found)
    assert torch.equal(mapped.values, found.values + 1)
    assert map_tensors(found, lambda one: one) is found


def test_a_container_may_hold_itself() -> None:
    tensor = torch.ones(1)
    held: list[object] = [tensor]
    held.append(held)
    assert tensors_of(held) == [tensor]


class Own(tuple):
    """A tuple of a user's, whose constructor nobody knows."""


class Fields:
    n_fields, _fields = 2, ("a", "b")


def test_tensors_are_found_and_replaced_in_the_same_containers() -> None:
    first, second = torch.zeros(1), torch.ones(1)
    value = (Own((first,)), Fields(), second)
    assert tensors_of(value) == [second]
    mapped = map_tensors(value, lambda one: one + 1)
    assert mapped[:2] == value[:2]
    assert mapped[2].tolist() == [2.0]


def test_sizes_stay_as_they_are() -> None:
    size = torch.ones(2, 3).shape
    assert map_tensors((size, torch.ones(1)), lambda one: one + 1)[0] is size


def test_packed_sequences_and_objects_with_a_to_of_their_own_move() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    there = moved({"words": packed}, torch.device("meta"))["words"]
    assert (there.data.is_meta, there.sorted_indices.is_meta, there.batch_sizes.tolist()) == (True, True, [2, 2, 1])
    assert tensors_of(packed)[0] is packed.data

    class Graph:
        def to(self, device: torch.device) -> tuple[str, torch.device]:
            return "moved", device

    assert moved(Graph(), torch.device("meta")) == ("moved", torch.device("meta"))


def test_a_batch_for_a_loss_function_is_a_pair() -> None:
    for batch in ({"x": torch.ones(1), "y": torch.ones(1)}, (torch.ones(1),) * 3):
        with pytest.raises(ValueError, match="those of an engine with loss_fn are pairs of inputs and labels"):
            loss_of(batch, torch.nn.Identity(), torch.nn.functional.mse_loss)
