"""Trainer of transformers with a ZeroMesh configuration."""

from __future__ import annotations

import transformers

from zeromesh.hf.mixin import TrainerMixin


class Trainer(TrainerMixin, transformers.Trainer):  # transformers has no types here
    """``transformers.Trainer`` with ``zeromesh="config.json"``; see ``TrainerMixin``."""
