"""Errors of a configuration: one error lists every problem."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """Error of a configuration that cannot be used, with all its problems.

    Attributes:
        problems: one line per problem, each with the dotted key, the value, the rule and the remedy.
        source: the file, or what else was read.
    """

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        self.source = source
        if len(self.problems) == 1:
            message = f"{source}: {self.problems[0]}"
        else:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            message = f"{source} has {len(self.problems)} problems:{lines}"
        super().__init__(message)

    # Exceptions are pickled by their message alone, and ranks send this one to each other.
    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...], str]]:
        return ConfigError, (self.problems, self.source)
