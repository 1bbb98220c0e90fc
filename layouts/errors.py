"""Refuses impossible sizes in words a user can act on. Knows no layout and no plan."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting that cannot work. Says the thing, what it got, what is allowed and what to do about it."""


class PlanError(ValueError):
    """A transfer plan that does not prove: a piece out of bounds, written twice or missing."""


def config_error(thing: str, *, got: object, allowed: str, remedy: str) -> ConfigError:
    """The one wording of configuration errors; the caller raises it."""
    return ConfigError(f"{thing}: got {got}; allowed: {allowed}. {remedy}")


def require_at_least(minimum: int, **sizes: object) -> None:
    """Each named size must be an integer of at least `minimum`.

    Raises:
        ConfigError: naming the first size that is not.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < minimum:
            raise config_error(
                name,
                got=repr(size),
                allowed=f"an integer of at least {minimum}",
                remedy=f"Set {name} to {minimum} or more.",
            )


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending: the candidates a remedy can name."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def listed(values: Iterable[object]) -> str:
    """Values as they appear in a message: `1, 2, 4`."""
    return ", ".join(str(value) for value in values)
