"""Models by name: configurations that their makers publish, without weights and without a network."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.apps.plan.cost.shape import TransformerShape

# Words of a name that do not change the shape.
SAME_SHAPE = {"instruct", "chat", "base", "hf", "it", "pt", "meta", "uncased", "v0.1", "v0.2", "2407", "8k", "4k"}
FORMULA = ("gpt2", "bert", "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2")
"""Kinds whose cost by formula is that of ``TransformerShape``; norms of queries and biases of keys are left out."""


class CatalogueModel(NamedTuple):
    """One model: its class and its ``config.json``."""

    name: str
    family: str
    parameters: int
    hub: str  # name on the Hugging Face Hub; "" for none
    kind: str  # class of transformers, or ``SdxlUnet``
    model_type: str
    facts: Mapping[str, Any]

    @property
    def causal(self) -> bool:
        """True for language models that ``zeromesh train`` trains."""
        return self.kind.endswith(("ForCausalLM", "LMHeadModel"))

    @property
    def images(self) -> bool:
        """True if samples are images, which have no tokens."""
        return self.kind.endswith(("ForImageClassification", "Unet"))

    def configuration(self) -> Any:
        """Return the configuration of transformers; raise ImportError if that is not installed."""
        import transformers

        config = transformers.AutoConfig.for_model(self.model_type, **self.facts)
        config.architectures, config.name_or_path = [self.kind], self.name
        return config

    def shape(self) -> TransformerShape | None:
        """Return the sizes for the cost by formula; None for other models than plain transformers."""
        facts = self.facts
        if self.model_type not in FORMULA:
            return None
        if self.model_type == "gpt2":
            sizes = (facts["n_layer"], facts["n_embd"], facts["n_head"], 50257)
            return TransformerShape(*sizes, positions=facts.get("n_positions", 1024), name=self.name)
        # Without facts, the numbers are those of BERT's base size.
        sizes = (
            facts.get("num_hidden_layers", 12),
            facts.get("hidden_size", 768),
            facts.get("num_attention_heads", 12),
            facts.get("vocab_size", 30522),
        )
        if self.model_type == "bert":
            return TransformerShape(*sizes, positions=512, dropout=True, name=self.name)
        return TransformerShape(
            *sizes,
            kv_heads=facts.get("num_key_value_heads", 0),
            width=facts["intermediate_size"],
            head_width=facts.get("head_dim", 0),
            gated=True,
            biases=False,
            tied=bool(facts.get("tie_word_embeddings", False)),
            name=self.name,
        )


@cache
def _tables() -> tuple[dict[str, CatalogueModel], dict[str, str]]:
    """Return the models by name, and their names by all spellings without signs."""
    document = json.loads(Path(__file__).with_name("named_models.json").read_text(encoding="utf-8"))
    models, names = {}, {}
    for name, family, parameters, hub, others, facts in document["models"]:
        kind, model_type, common = document["families"][family]
        models[name] = CatalogueModel(name, family, parameters, hub, kind, model_type, common | facts)
        for spelling in (name, hub.partition("/")[2], *others):
            names[_plain(spelling)] = name
    return models, names


def catalogue() -> dict[str, CatalogueModel]:
    """Return all models by name."""
    return _tables()[0]


def find_model(text: str) -> CatalogueModel | None:
    """Return the model of a name, such as ``llama-3.1-8b``, ``Llama3.1 8B`` or ``meta-llama/Llama-3.1-8B``."""
    models, names = _tables()
    owner, _, last = text.rpartition("/")
    model = models.get(names.get(_plain(last), ""))
    # The model of another owner may have another shape.
    return model if model and (not owner or model.hub.lower().startswith(f"{owner.lower()}/")) else None


def close_names(text: str, most: int = 4) -> list[str]:
    """Return the names that are most like a text."""
    models, names = _tables()
    plain = _plain(text.rpartition("/")[2])
    same_start = [name for name in models if plain and _plain(name).startswith(plain)]
    near = [names[spelling] for spelling in difflib.get_close_matches(plain, names, n=2 * most, cutoff=0.7)]
    return [*dict.fromkeys((*same_start, *near))][:most]


def _plain(name: str) -> str:
    words = re.split(r"[\s_/-]+", name.lower())
    return re.sub(r"[^a-z0-9]", "", "".join(word for word in words if word not in SAME_SHAPE))
