"""Section ``curriculum_learning``, and the part of ``data_efficiency`` that says the same in another form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from zeromesh.config.section import PositiveInt, Section, key
from zeromesh.config.special_keys import look_up


class LengthSchedule(Section):
    """Growth of the length, counted in updates."""

    total_curriculum_step: PositiveInt | None = key(None, "Number of updates until the length is max_difficulty.")
    difficulty_step: PositiveInt = key(8, "The length is rounded down to a multiple of this.")
    root_degree: PositiveInt | None = key(None, "For fixed_root: the degree of the root; 2 is the square root.")
    difficulty: list[int] | None = key(None, "For fixed_discrete: the lengths, in order.")
    max_step: list[int] | None = key(
        None, "For fixed_discrete: the last update of each length, except the last length."
    )


class Curriculum(Section):
    """Curriculum learning: short samples first, then longer ones."""

    enabled: bool = key(False, "Truncate the samples of the first updates.")
    curriculum_type: Literal["seqlen"] = key("seqlen", "Quantity that grows: the length of sequences.")
    min_difficulty: PositiveInt = key(8, "First length, in tokens.")
    max_difficulty: PositiveInt | None = key(None, "Last length, in tokens.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] = key(
        "fixed_linear", "Growth of the length. custom is refused."
    )
    schedule_config: LengthSchedule = key(LengthSchedule(), "Parameters of the growth.")

    @field_validator("schedule_type")
    @classmethod
    def _has_a_formula(cls, value: str) -> str:
        if value == "custom":
            raise ValueError("is not available; use fixed_discrete, with the lengths in schedule_config.difficulty")
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        course = self.schedule_config
        discrete, root = self.schedule_type == "fixed_discrete", self.schedule_type == "fixed_root"
        needed = {
            "max_difficulty": self.max_difficulty or discrete,
            "schedule_config.total_curriculum_step": course.total_curriculum_step or discrete,
            "schedule_config.root_degree": course.root_degree or not root,
            "schedule_config.difficulty": course.difficulty or not discrete,
            "schedule_config.max_step": course.max_step is not None or not discrete,
        }
        missing = [name for name, there in needed.items() if not there]
        if self.enabled and missing:
            raise ValueError(f'{", ".join(missing)} must be given for schedule_type = "{self.schedule_type}"')
        if self.enabled and discrete and len(course.difficulty or ()) != len(course.max_step or ()) + 1:
            raise ValueError("schedule_config.difficulty must have one entry more than schedule_config.max_step")
        if not discrete and self.min_difficulty < course.difficulty_step:
            raise ValueError(
                f"min_difficulty = {self.min_difficulty} would be rounded down to 0 tokens; it must be at least "
                f"schedule_config.difficulty_step = {course.difficulty_step}"
            )
        if not discrete and self.max_difficulty is not None and self.max_difficulty < self.min_difficulty:
            raise ValueError(f"max_difficulty = {self.max_difficulty} is below min_difficulty = {self.min_difficulty}")
        return self


_EFFICIENCY = "data_efficiency"
_SAMPLING = f"{_EFFICIENCY}.data_sampling"
_LEARNING = f"{_SAMPLING}.curriculum_learning"
_COURSE = ("min_difficulty", "max_difficulty", "schedule_type", "schedule_config")


def sampled_by_length(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document whose ``data_efficiency``, if it is a curriculum over the length alone, is the plain section.

    Everything else of the section stays, and is refused where it is on.
    """
    metrics = look_up(document, f"{_LEARNING}.curriculum_metrics")[1]
    if not (isinstance(metrics, Mapping) and len(metrics) == 1 and "curriculum_learning" not in document):
        return document
    name, metric = next(iter(metrics.items()))
    on = all(look_up(document, f"{path}.enabled")[1] is True for path in (_EFFICIENCY, _SAMPLING, _LEARNING))
    # Samples are cut, and not chosen, where all of them are in one cluster.
    cuts = isinstance(metric, Mapping) and metric.get("clustering_type") == "single_cluster"
    if not (on and cuts and name.startswith("seqlen")):
        return document
    course = {key: value for key, value in metric.items() if key in _COURSE}
    rest = {key: value for key, value in document[_EFFICIENCY].items() if f"{_EFFICIENCY}.{key}" != _SAMPLING}
    return document | {_EFFICIENCY: rest, "curriculum_learning": {"enabled": True, **course}}
