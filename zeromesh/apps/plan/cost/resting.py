"""A mixture whose experts rest off the device: each layer's experts are the rows of a table that tokens look up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeromesh.apps.plan.cost.cost import CostSource, Divided, ModelCost, TableCost, UnitCost


@dataclass(frozen=True)
class RestingCost:
    """Model of which a rank has the experts that a micro-batch chooses, and no others."""

    source: CostSource  # the model with all of its experts
    width: int  # bytes of an element as computed with

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.source.name

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        """Return the cost of a micro-batch; ``context`` ranks share each sequence."""
        cost = self.source.at(micro_batch, sequence, context)
        alike: dict[object, UnitCost] = {}  # parts of units that are alike are one object
        units = []
        for unit in cost.units:
            if unit.experts is not None:
                key = unit.parameters, unit.frozen, unit.experts, unit.tables, *unit.saved.items()
                if key not in alike:
                    alike[key] = self._at_rest(unit)
                names = ("parameters", "frozen", "saved", "tables", "experts")
                unit = replace(unit, **{name: getattr(alike[key], name) for name in names})
            units.append(unit)
        return replace(cost, units=tuple(units))

    def _at_rest(self, unit: UnitCost) -> UnitCost:
        """Return a unit whose experts are rows; where some of their weights are frozen, trained ones are adapters."""
        experts = unit.experts
        assert experts is not None
        frozen = experts.frozen.sharded
        trained = 0.0 if frozen.on() else experts.parameters
        width, read_only = round(trained / experts.number), frozen.on() / experts.number
        looked_up = experts.tokens * experts.chosen
        rows = min(experts.number, looked_up) * (width * self.width + read_only)
        saved = {
            policy: size if policy.repeats else size.plus(Divided(whole=rows))  # else the graph keeps them
            for policy, size in unit.saved.items()
        }
        return replace(
            unit,
            parameters=unit.parameters.plus(Divided(split=-trained)),
            frozen=unit.frozen._replace(sharded=unit.frozen.sharded.plus(frozen.times(-1))),
            saved=saved,
            tables=(*unit.tables, TableCost("experts", experts.number, width, looked_up, True, read_only)),
            experts=None,
        )
