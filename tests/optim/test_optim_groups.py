import pytest
import torch
from torch import nn

from zeromesh import no_decay_groups
from zeromesh.shard.optim.groups import hidden_matrices


class TinyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((2, 4)), TinyRMSNorm(), nn.BatchNorm1d(4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.conv = nn.Conv1d(4, 4, 3)
        self.position_bias = nn.Parameter(torch.zeros(2, 3))
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.tokens.weight
        self.lm_head = nn.Linear(4, 7)


def names_of(model: nn.Module, group: dict) -> set[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in group["params"]}


def test_no_decay_groups_exempt_biases_norms_and_vectors_only():
    model = Model()
    decayed, exempt = no_decay_groups(model, 0.1)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert names_of(model, decayed) == {
        "tokens.weight",
        "block.0.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "conv.weight",
        "lm_head.weight",
    }
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names_of(model, exempt) == trainable - names_of(model, decayed)
    assert len(decayed["params"]) + len(exempt["params"]) == len(trainable)


def test_no_decay_groups_keep_two_groups_and_refuse_negative_decay():
    groups = no_decay_groups(nn.Linear(2, 2, bias=False), 0.1)
    assert [len(group["params"]) for group in groups] == [1, 0]
    with pytest.raises(ValueError, match="-1"):
        no_decay_groups(Model(), -1)


def test_hidden_matrices_leave_out_embeddings_heads_norms_and_ties():
    assert hidden_matrices(Model()) == {"block.0.weight", "attention.in_proj_weight", "attention.out_proj.weight"}


def test_use_muon_on_a_parameter_decides():
    model = Model()
    model.conv.weight.use_muon = True
    model.block[0].weight.use_muon = False
    assert hidden_matrices(model) == {"conv.weight", "attention.in_proj_weight", "attention.out_proj.weight"}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.readout = nn.Linear(4, 7, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class SaysItself(Blocks):
    def get_output_embeddings(self) -> nn.Module:
        return self.first


def test_the_last_linear_layer_outside_the_blocks_is_the_head_and_models_may_say_more():
    assert hidden_matrices(Blocks()) == {"first.weight", "layers.0.weight", "layers.1.weight"}
    assert hidden_matrices(SaysItself()) == {"layers.0.weight", "layers.1.weight"}
