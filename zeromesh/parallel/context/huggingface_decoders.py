"""Context parallelism of decoders and encoders of transformers."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from zeromesh.comm.collectives import Group
from zeromesh.parallel.context import spread_batch as batch
from zeromesh.parallel.context.applied import (
    SpreadSequences,
    arguments_of_sequences,
    is_token_mean,
    parameters_of,
    refuse,
    stand_in,
)
from zeromesh.parallel.context.document_order import order_of
from zeromesh.parallel.context.pair_rules import CausalPairs, RulePairs
from zeromesh.parallel.context.sequence_order import require_length
from zeromesh.parallel.context.spread_attention import ring
from zeromesh.parallel.context.torch_attention import check_of, followed, require_no_mixing
from zeromesh.parallel.context.whole_masks import Whole, attention_of, of_heads
from zeromesh.parallel.follow.activation_parts import replace_forward
from zeromesh.parallel.follow.token_check import Following, TokenCheck

_numbers = itertools.count()

KNOWN = ("torch", "transformers", "peft", "bitsandbytes", "zeromesh")  # packages whose layers are known

# Rotary positions whose frequencies depend on the longest position that a rank has.
_FROM_LONGEST = ("dynamic", "longrope")

# Ends of names of classes whose labels are those of the tokens themselves, and their loss the mean over those.
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")


def install(model: Any, applied: SpreadSequences, unchecked: Sequence[str] = ()) -> None:
    """Change a model of transformers so that its sequences are spread over ranks. Raise Unsupported if it cannot.

    Code of classes that are not of transformers is checked as that of other models is.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    require(model)
    implementation = model.config._attn_implementation
    # Models call attention, and make masks, through tables by the name in their configuration: each gets a name of its
    # own.
    name = f"zeromesh_context_{next(_numbers)}"
    functions = ALL_ATTENTION_FUNCTIONS.get(implementation), ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    replacements = _Replacements(model, applied, *functions, applied.takes_rules(implementation))
    AttentionInterface.register(name, replacements.attention)
    AttentionMaskInterface.register(name, replacements.mask)
    # The tables live as long as the process, and would keep a function for every model that ever was.
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        weakref.finalize(model, table._global_mapping.pop, name, None)
    model.set_attn_implementation(name)
    if "labels" in parameters_of(type(model)):
        loss = model.loss_function
        model.loss_function = update_wrapper(partial(_loss, loss, applied, _shifts(model)), loss)
    if any(type(module).__module__.partition(".")[0] not in KNOWN for module in model.modules()):
        replacements.check = check_of(model, applied, unchecked, trusted="transformers")
        replacements.check.install(model)
    replace_forward(model, partial(replacements.run, model, model.forward))


def require(model: Any) -> None:
    """Raise Unsupported if a model's attention cannot be replaced."""
    config, name = model.config, type(model).__name__
    parameters = parameters_of(type(model))
    for applies, reason in (
        (config.is_encoder_decoder, "it is an encoder with a decoder, and only models with one sequence can be spread"),
        (model._is_stateful, "its state-space or recurrent layers read a sequence from its begin"),
        (getattr(config, "alibi", False), "it adds biases to its attention's scores (ALiBi)"),
    ):
        if applies:
            raise refuse(name, reason)
    _require_kinds(model)
    if not model._supports_attention_backend:
        reason = "it computes attention itself (with ALiBi, say) and not by transformers' table of attention functions"
        raise refuse(name, reason)
    if config._attn_implementation not in ("sdpa", "eager"):
        raise refuse(
            name,
            f"its attention is {config._attn_implementation!r}, and only 'sdpa' and 'eager' are replaced",
            "build it with attn_implementation='sdpa', where it has that, or set mesh.context to 1",
        )
    for option in ("attention_dropout", "attn_pdrop", "layerdrop"):
        if isinstance(value := getattr(config, option, 0.0), int | float) and value > 0:
            raise refuse(name, f"{option} is {value:g}, which ranks would have to draw alike", f"set {option} to 0")
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(entry for entry in rope.values() if isinstance(entry, dict))):
        if settings.get("rope_type") in _FROM_LONGEST:
            reason = f"the frequencies of its rotary positions ({settings['rope_type']}) follow the longest position "
            raise refuse(name, f"{reason}that a rank has", "take another rope_type, or set mesh.context to 1")
    if "position_ids" not in parameters:
        raise refuse(name, "its forward takes no position_ids")
    if (
        "labels" in parameters
        and _shifts(model)
        and "shift_labels" not in inspect.signature(model.loss_function).parameters
    ):
        loss = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        raise refuse(name, f"its loss, {loss}, takes no shift_labels, so it is not the one of next tokens")


def _shifts(model: Any) -> bool:
    """Return False if a model's labels are those of the tokens themselves, and True if of the next ones."""
    return not type(model).__name__.endswith(_UNSHIFTED)


def _require_kinds(model: Any) -> None:
    """Raise Unsupported if layers mix tokens otherwise than by an attention that can be replaced."""
    require_no_mixing(model)
    replaced = ("full_attention", "sliding_attention", "chunked_attention")
    for number, kind in enumerate(getattr(model.config, "layer_types", None) or []):
        if kind not in replaced:
            what = f"layer {number} of {type(model).__name__}"
            raise refuse(what, f"it is of the kind {kind}, not {' or '.join(replaced)}")
    for path, module in model.named_modules():
        if reason := _OVER_TOKENS.get(type(module).__name__):
            raise refuse(f"{path} ({type(module).__name__})", reason)
        if path.rpartition(".")[2] == "pooler":
            reason = "it reads the first token, which one rank has"
            raise refuse(path, reason, "build the model with add_pooling_layer=False, or set mesh.context to 1")


# Modules of transformers' models that compute over tokens beside their attention, and what.
_OVER_TOKENS = {
    "DogeAttention": "its mask follows from the values of all tokens",
    "EsmEmbeddings": "it counts the masked tokens of whole sequences",
    "MobileBertEmbeddings": "it joins each token's embedding with its neighbours'",
}


def _counted_positions(model: nn.Module, named: Mapping[str, Any]) -> Tensor | None:
    """Return the positions of whole sequences, as a model like RoBERTa counts them; None for others."""
    # From ``padding_idx + 1`` on, and without the padding: the tokens before a rank's part must be seen.
    name = "input_ids" if named.get("input_ids") is not None else "inputs_embeds"
    for module in model.modules():
        count = getattr(module, _COUNTING[name], None)
        if count is not None:
            settings = {name: named[name], "padding_idx": module.padding_idx, "past_key_values_length": 0}
            counted: Tensor = count(**{key: settings[key] for key in inspect.signature(count).parameters})
            return counted.expand(named[name].shape[:2])
    return None


# Methods by which modules of transformers' models count positions, by what they count those of.
_COUNTING = {
    "input_ids": "create_position_ids_from_input_ids",
    "inputs_embeds": "create_position_ids_from_inputs_embeds",
}


class _Replacements:
    """Replacements of a model's forward, attention and mask functions."""

    def __init__(self, model: nn.Module, applied: SpreadSequences, attention: Any, mask: Any, ring: bool) -> None:
        self._kind, self._applied, self._own, self._own_mask = type(model), applied, attention, mask
        self._ring = ring  # masks are rules, and not made for whole sequences
        self._proven = weakref.WeakSet[nn.Module]()  # those whose eager attention is what the ring computes
        self._whole = Whole((0, 0))
        self._model = weakref.ref(model)  # the tables that hold this must not keep the model
        self._has_sinks = any(hasattr(module, "sinks") for module in model.modules())
        self.check: TokenCheck | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Replacements:
        """Return the same object: the tables, which a copy of a model uses, too, call this one."""
        return self

    def run(self, model: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        applied = self._applied
        if not applied.replaces:
            return forward(*args, **kwargs)
        named, name = arguments_of_sequences(self._kind, args, kwargs), self._kind.__name__
        counted, shifts = _counted_positions(model, named), _shifts(model)
        self._whole = _whole(model, named, counted)
        # Code that is checked may read tokens of one of a rank's two chunks together.
        documents = self._whole.documents if self._ring and self.check is None else None
        if documents is not None:
            require_length(documents.shape[1], applied.group.size)
        applied.begin(None if documents is None else order_of(documents, applied.parts))
        part = batch.split(named, applied.group, shift=shifts, counted=counted, masked=True, order=applied.order)
        if self.check is None:
            output = forward(**part)
        else:
            with Following(self.check), followed(name, self.check, part, applied):
                output = forward(**part)
        applied.require_attention(name)
        # A loss that was computed otherwise would be the mean over this rank's tokens only.
        if "labels" in part and not applied.losses and not shifts and hasattr(output, "loss"):
            output.loss = applied.mean_loss(output.loss, part["labels"])
        if "labels" in part and not applied.losses:
            raise refuse(name, "it computes its loss without its loss_function")
        return output

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
    ) -> tuple[Tensor, Any]:
        """Attention function in the signature of transformers, by any mask: (batch, heads, sequence, width)."""
        applied, mask = self._applied, attention_mask
        if not applied.replaces:
            output: tuple[Tensor, Any] = attention_of(self._own, module)(module, query, key, value, mask, **settings)
            return output
        self._require_spread(module, query, mask, settings)
        causal = settings.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        options: dict[str, Any] = {}
        if applied.sends and self._ring:
            options = self._for_ring(module, query, key, value, mask, causal, settings)
        elif applied.sends:
            options["run"] = of_heads(module, self._own, applied.group.rank, query.shape[1], mask, settings)
        out = applied.attend(query, key, value, settings.get("scaling"), **options)
        return out.transpose(1, 2).contiguous(), None

    def _require_spread(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
    ) -> None:
        """Raise Unsupported if attention is not what ranks compute together."""
        # Not of the last forward: this may be a recomputation of one before it.
        rows, length = query.shape[0], query.shape[2] * self._applied.group.size
        reason = ""
        if settings.get("dropout", 0.0) > 0:
            reason = f"its attention has dropout {settings['dropout']:g}, which ranks would have to draw alike"
        elif settings.get("position_bias") is not None:
            reason = "its attention adds a bias to scores"
        elif self._applied.strategy == "ring" and self._own is not None and settings.get("softcap") is not None:
            reason = f"sdpa does not cap its attention's scores at {settings['softcap']}: build it with eager attention"
        elif mask is not None and self._applied.sends and (mask.shape[0], *mask.shape[-2:]) != (rows, length, length):
            reason = f"it has a mask of its own, of shape {tuple(mask.shape)}"
        if reason:
            raise refuse(self._name(module), reason)

    def _for_ring(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, settings: Any
    ) -> dict[str, Any]:
        """Return the options of attention with keys that go around the ranks."""
        eager = self._own is None
        # torch's attention takes neither caps nor sinks.
        special = {"cap": settings.get("softcap"), "sinks": settings.get("s_aux")} if eager else {}
        options = {name: option for name, option in {"mask": mask, **special}.items() if option is not None}
        if "sinks" in options and options["sinks"].numel() != q.shape[1]:
            reason = f"it has {options['sinks'].numel()} sinks for {q.shape[1]} heads of this rank"
            raise refuse(self._name(module), reason, "set mesh.tensor or mesh.context to 1")
        if mask is None and (eager or not causal):  # it sees all tokens
            options["pairs"] = RulePairs([], self._applied.parts, q.shape[2] * self._applied.group.size)
        if eager and module not in self._proven:
            self._prove(module, q, k, v, settings=settings, options=options)
            self._proven.add(module)
        return options

    def _prove(self, module: nn.Module, *tensors: Tensor, settings: dict[str, Any], options: dict[str, Any]) -> None:
        """Raise Unsupported if the attention of the model's own file computes something else than ``ring``."""
        generator, alone = torch.Generator().manual_seed(0), cast("Group", SimpleNamespace(size=1, rank=0))
        device, wide = tensors[0].device, torch.promote_types(tensors[0].dtype, torch.float32)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            shapes = [(1, x.shape[1], 4, x.shape[3]) for x in tensors]
            q, k, v = (torch.randn(shape, generator=generator).to(device, wide) for shape in shapes)
            later = q.new_full((1, 1, 4, 4), torch.finfo(wide).min).triu(1)
            want = attention_of(None, module)(module, q, k, v, later, **settings)[0].transpose(1, 2)
            special = {name: options.get(name) for name in ("sinks", "cap")}
            computed = ring(q, k, v, alone, 0, settings.get("scaling"), CausalPairs(1), **special)
        if not torch.allclose(computed, want, rtol=1e-3, atol=1e-4):
            reason = "its eager attention is not the usual product of probabilities and values"
            raise refuse(self._name(module), reason, "take the strategy ulysses, and ranks that divide the heads")

    def _name(self, module: nn.Module) -> str:
        model = self._model()
        paths = [] if model is None else [path for path, submodule in model.named_modules() if submodule is module]
        return f"{paths[0] if paths else 'a module'} ({type(module).__name__})"

    def mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mask of whole sequences, in the signature of transformers; None where attention is causal."""
        if not self._applied.replaces:
            return self._own_mask(*args, **kwargs)
        name, applied, (rows, length) = self._kind.__name__, self._applied, self._whole.shape
        shape = (rows, 1, length, length)
        if not applied.sends:  # numbers of tokens are not there to be read
            plain = self._whole.causal(name, kwargs)
            return None if plain else stand_in(CausalPairs(applied.parts), shape, kwargs["device"])
        if not self._ring:
            return self._whole.make(self._own is None, name, kwargs)
        rules = self._whole.rules(name, kwargs)
        causal = [rule.name for rule in rules] == ["causal"]
        if causal and self._own is not None:
            return None
        if self._own is None and self._whole.blind(rules) and not self._has_sinks:
            reason = "in its eager attention tokens that see none, as padding before others, see all tokens alike"
            raise refuse(name, reason, "pad at the end, or take sdpa, or the strategy ulysses")
        pairs = CausalPairs(applied.parts) if causal else RulePairs(rules, applied.parts, length, applied.order)
        return stand_in(pairs, shape, kwargs["device"])


def _whole(model: Any, named: Mapping[str, Any], counted: Tensor | None) -> Whole:
    """Return what attention must know of a batch. Raise ValueError for a mask that is not known to be made exactly."""
    from transformers import masking_utils

    first = next((named[name] for name in batch.TOKENS if named.get(name) is not None), None)
    shape = (0, 0) if first is None else tuple(first.shape[:2])
    mask, positions = named.get("attention_mask"), named.get("position_ids")
    if mask is not None:
        if mask.shape != shape:
            raise batch.NotCut(
                f"attention_mask has shape {tuple(mask.shape)}, but it must have that of the tokens, {shape}: context "
                "parallelism makes masks of pairs itself; give one of tokens, or set mesh.context to 1"
            )
        mask = mask.bool()
        if positions is None and counted is None and bool((mask[:, 1:] > mask[:, :-1]).any()):
            for module in model.modules():
                if isinstance(module, nn.Embedding) and "attention_mask" in parameters_of(type(module)):
                    raise batch.NotCut(
                        f"{type(module).__name__} counts positions by attention_mask, which hides tokens that come "
                        "before others: pad at the end, give position_ids, or set mesh.context to 1"
                    )
        mask = None if bool(mask.all()) else mask
    labels = next((named[name] for name in batch.LABELS if named.get(name) is not None), None)
    counts = mask is not None and labels is not None and bool((labels.ne(batch.IGNORE_LABEL) & ~mask).any())
    ends = mask is not None and not counts and not bool((mask[:, 1:] > mask[:, :-1]).any())
    # As transformers does: given a mask, even of ones, positions do not separate documents.
    documents = None
    if named.get("attention_mask") is None and positions is not None and positions.ndim == 2:
        documents = masking_utils.find_packed_sequence_indices(positions := positions.expand(shape))
    return Whole(shape, mask, positions, documents, ends)


def _loss(
    loss: Any, applied: SpreadSequences, shifts: bool, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute a model's loss of labels that are shifted already, of this rank's part of the sequence."""
    if not applied.replaces:
        return loss(logits, labels, *args, **kwargs)
    shifted = {"shift_labels": labels} if shifts else {}
    if applied.sends and not is_token_mean(loss, logits, shifts, args, kwargs):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise refuse(name, "it is not the mean over the tokens whose label is not -100, so ranks' losses do not add up")
    return applied.mean_loss(loss(logits, labels, *args, **shifted, **kwargs), labels)
