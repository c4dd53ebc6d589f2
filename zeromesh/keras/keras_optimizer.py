"""A Keras optimizer over the pieces of parameters that a rank updates: Keras computes the update itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import torch
from torch.optim import Optimizer

from zeromesh.base.piece import Piece
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
"""Optimizers of Keras that update each element by itself, so that pieces are updated as whole parameters are."""

_REFUSED = {
    "use_ema": "the average would be of pieces; leave it out, or average the weights in a loop of your own",
    "gradient_accumulation_steps": "set gradient_accumulation_steps, and the rows of a rank's batch as "
    "train_micro_batch_size_per_gpu, in the "
    "configuration",
    "loss_scale_factor": 'set "fp16": {"enabled": true} in the configuration, which scales the loss',
}
"""Options of any Keras optimizer, with what to write."""


class KerasOptimizer(Optimizer):
    """Lets a Keras optimizer update parameters, or the pieces of them that ``zeromesh.initialize`` puts in their place.

    The learning rate is read from ``optimizer`` at each update, so that callbacks and schedules of Keras set it.
    Clipping by norm takes whole gradients, over all ranks. ``optimizer`` itself gets no states, and its iterations
    are counted on. States that it has, of updates before or of a file, move to the pieces.

    Args:
        optimizer: a Keras optimizer that updates element by element (``ELEMENTWISE``).
        variables: trainable Keras variables of a model that ``expose_layers`` has prepared.
        names: of their parameters, in the same order.

    Raises:
        ValueError: another optimizer, or an option that pieces cannot honour.
    """

    updates_pieces = True  # Keras computes each element by itself

    def __init__(self, optimizer: Any, variables: Iterable[Any], names: Iterable[str]) -> None:
        check_optimizer(optimizer)
        self.keras_optimizer = optimizer
        self._variables = dict(zip(names, variables, strict=True))
        self._group: Group | None = None  # ranks that have the other pieces; None: there are whole parameters here
        self._own: Any = None  # made with the first update, over the pieces
        self._pieces: dict[str, Any] = {}  # Keras variables of the pieces, by the name of the parameter
        # (Name of the parameter, name of the state, Keras variable) of each state that is like its parameter.
        self._slots: list[tuple[str, str, Any]] = []
        self._kind = type(optimizer).__name__
        pairs = [(name, variable.value) for name, variable in self._variables.items()]
        if not pairs:
            raise ValueError("the model has no trainable variables to update: pass no optimizer, to evaluate it only")
        done = int(optimizer.iterations.numpy())
        # Not in ``state`` at once: ``initialize`` takes no optimizer that has been stepped.
        self._whole, numbers = _taken_states(optimizer, self._variables)
        super().__init__(pairs, {"lr": rate(optimizer), "iteration": done, "kind": self._kind, **numbers})

    def connect(self, mesh: Mesh, sharded: bool, pieces: Iterable[Piece]) -> None:
        """Set the group whose gradients count in norms, and cut the states of whole variables into pieces."""
        self._group = mesh.shard if sharded and mesh.shard.size > 1 else None
        for piece in pieces:
            for key, whole_state in self._whole.get(piece.name, {}).items():
                state_piece = piece.cut(whole_state).to(piece.parameter, copy=True)
                self.state[piece.parameter][key] = state_piece.view_as(piece.parameter)
        self._whole = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the pieces by their gradients."""
        group = self.param_groups[0]
        if group["kind"] != self._kind:
            raise ValueError(
                f"the checkpoint that was loaded is of Keras' {group['kind']}, and the model is compiled with "
                f"{self._kind}: compile it with the same optimizer, or load with load_optimizer_states=False"
            )
        with keras.device(str(group["params"][0].device) if group["params"] else "cpu"):
            if self._own is None:
                self._build(group)
            self._own.iterations.assign(group["iteration"])
            self.keras_optimizer.iterations.assign(group["iteration"])
            self._follow_states(group)
            group["lr"] = rate(self.keras_optimizer)
            used = {
                name: parameter
                for name, parameter in zip(group["param_names"], group["params"], strict=True)
                if parameter.grad is not None
            }
            gradients = self._clipped({name: parameter.grad for name, parameter in used.items()})
            if used:
                self._own.apply(gradients, [self._pieces[name] for name in used])
            group["iteration"] += 1
            self.keras_optimizer.iterations.assign(group["iteration"])
            for key, variable in self._numbers():
                group[key] = float(variable.numpy())

    def _build(self, group: dict[str, Any]) -> None:
        optimizer = self.keras_optimizer
        config = optimizer.get_config()
        # Clipping by norm is done here, over whole gradients; the learning rate may change at any time.
        config |= {"clipnorm": None, "global_clipnorm": None}
        config["learning_rate"] = lambda: optimizer.learning_rate
        self._own = type(optimizer).from_config(config)
        excluded = []
        for number, (name, piece) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            variable = keras.Variable(piece, dtype=str(piece.dtype).removeprefix("torch."), name=f"piece{number}")
            vars(variable)["_value"] = piece  # the very parameter, which moves with offload
            self._pieces[name] = variable
            if not optimizer._use_weight_decay(self._variables[name]):
                excluded.append(variable)
        self._own.exclude_from_weight_decay(var_list=excluded)
        self._own.build(list(self._pieces.values()))
        begins = {f"{piece.path.replace('/', '_')}_": name for name, piece in self._pieces.items()}
        for variable in self._own.variables:
            for begin in [prefix for prefix in begins if variable.name.startswith(prefix)]:
                self._slots.append((begins[begin], variable.name.removeprefix(begin), variable))
        for key, variable in self._numbers():
            if key in group:  # of a checkpoint
                variable.assign(group[key])

    def _numbers(self) -> list[tuple[str, Any]]:
        """Return the states that are no parameter's, such as Nadam's product of momenta, with a key for each."""
        slot_ids = {id(variable) for _, _, variable in self._slots}
        rest = [
            variable
            for variable in self._own.variables
            if id(variable) not in slot_ids and variable is not self._own.iterations
        ]
        # By number: Keras counts names of variables per process.
        return [(f"number_{place}", variable) for place, variable in enumerate(rest)]

    def _follow_states(self, group: dict[str, Any]) -> None:
        """Let Keras and torch share the states: those of a checkpoint, or that were moved, count."""
        by_name = dict(zip(group["param_names"], group["params"], strict=True))
        for name, key, variable in self._slots:
            states = self.state[by_name[name]]
            if key not in states:
                states[key] = variable.value.detach()
            vars(variable)["_value"] = states[key]

    def _clipped(self, gradients: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients, clipped as the optimizer says, by norms over all ranks. Collective if it clips."""
        each, global_limit = self.keras_optimizer.clipnorm, self.keras_optimizer.global_clipnorm
        if not each and not global_limit:
            return list(gradients.values())
        # All parameters on every rank: the vector of squares is as long on each.
        zero = torch.zeros((), dtype=torch.float64)
        squares = [gradients[n].double().square().sum().cpu() if n in gradients else zero for n in self._variables]
        sums = torch.stack(squares)
        if self._group is not None:
            sums = self._group.exchange(sums).sum(0)
        norms = dict(zip(self._variables, sums.sqrt(), strict=True))
        if global_limit:
            norm = sums.sum().sqrt()
            # Keras's own formula: a norm that is not finite makes the gradients so.
            scale = global_limit * torch.minimum(1.0 / norm, torch.tensor(1.0 / global_limit).double()) + (norm - norm)
            return [gradient * scale.to(gradient) for gradient in gradients.values()]
        return [g * each / norms[name].clamp(min=each).to(g) for name, g in gradients.items()]


def _taken_states(
    optimizer: Any, variables: Mapping[str, Any]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, float]]:
    """Take the states that a Keras optimizer has: by names of parameter and state, and those of no parameter."""
    remaining_ids = {id(optimizer._iterations), id(optimizer._learning_rate)}
    begins = {f"{variable.path.replace('/', '_')}_": name for name, variable in variables.items()}
    states: dict[str, dict[str, torch.Tensor]] = {}
    numbers: dict[str, float] = {}
    for state in [variable for variable in optimizer._variables if id(variable) not in remaining_ids]:
        # The longest, as one variable's name may begin with that of another.
        begin = max((prefix for prefix in begins if state.name.startswith(prefix)), key=len, default=None)
        if begin is None:
            numbers[f"number_{len(numbers)}"] = float(state.numpy())
            continue
        states.setdefault(begins[begin], {})[state.name.removeprefix(begin)] = state.value.detach()
        vars(state)["_value"] = torch.empty(0)  # the pieces are all that is kept of it
    # Or files of the model would have states that nobody updates.
    optimizer._variables[:] = [variable for variable in optimizer._variables if id(variable) in remaining_ids]
    return states, numbers


def without_scaling(optimizer: Any) -> Any:
    """Return the optimizer in Keras' ``LossScaleOptimizer``, in whose place the engine scales; others as they are."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def rate(optimizer: Any) -> float:
    """Return the present learning rate of a Keras optimizer."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError if pieces of parameters cannot be updated by a Keras optimizer."""
    names = [base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("keras.src.optimizers")]
    kind = type(optimizer).__name__
    from_keras = type(optimizer).__module__.startswith("keras.src.")
    if not from_keras or names[0] not in ELEMENTWISE:
        raise ValueError(
            f"the model is compiled with the optimizer {kind}, which is not known to update each element by itself, as "
            f"it must where parameters are sharded: use one of keras.optimizers.{', '.join(ELEMENTWISE)}, or write the "
            "loop yourself with zeromesh.initialize and an optimizer of its configuration"
        )
    for option, remedy in _REFUSED.items():
        if value := getattr(optimizer, option, None):
            raise ValueError(f"the optimizer {kind} has {option}={value!r}: {remedy}")


def check_variables(variables: Iterable[Any]) -> None:
    """Raise ValueError for a constraint, which looks at whole variables."""
    for variable in variables:
        if variable.constraint is not None:
            raise ValueError(
                f"variable {variable.path} has the constraint {type(variable.constraint).__name__}, which would be "
                "applied to pieces of it: leave it out, or use weight_decay of the optimizer"
            )
