"""Names of an engine that its parts answer: a class lists them, and callers see plain methods and attributes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from zeromesh.comm.course import this_rank

P = ParamSpec("P")
T = TypeVar("T")


class Attribute(Generic[T]):
    """Attribute of a part under a name of the engine; what is written to it goes to the part.

    Args:
        part: path from the engine to the part.
        name: of the attribute there; None: as the engine's.
    """

    def __init__(self, part: str, name: str | None = None) -> None:
        self._part, self._name = attrgetter(part), name or ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, engine: Any, owner: type | None = None) -> T:
        value: Any = self if engine is None else getattr(self._part(engine), self._name)
        return value  # type: ignore[no-any-return]

    def __set__(self, engine: Any, value: T) -> None:
        setattr(self._part(engine), self._name, value)

    def __delete__(self, engine: Any) -> None:
        delattr(self._part(engine), self._name)


def of_part(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method, with the signature and docstring of a part's, that calls the part's."""
    name = method.__name__

    @wraps(method)
    def call(engine: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with this_rank.within(f"{name}()"):
            result: T = getattr(getattr(engine, part), name)(*args, **kwargs)
        return result

    return call
