"""Checks of single option values, whose messages name the option, the value and the limit."""

from __future__ import annotations

import operator
from typing import Any


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """
    `value` as a plain `int`.

    Raises:
        `TypeError`: it is no integer (a bool is none).
        `ValueError`: it is not in `low .. high`.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name}={value} is a bool, not an integer.")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not an integer.") from None
    if low is not None and number < low:
        raise ValueError(f"{name}={number} is below {low}, the smallest value allowed.")
    if high is not None and number > high:
        raise ValueError(f"{name}={number} is above {high}, the largest value allowed.")
    return number


def fraction(name: str, value: Any) -> float:
    """
    `value` as a plain `float` in (0, 1].

    Raises:
        `TypeError`: it is no number.
        `ValueError`: it is not in (0, 1].
    """
    if not is_number(value):
        raise TypeError(f"{name}={value!r} is not a number; give one in (0, 1].")
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value} is not in (0, 1].")
    return float(value)


def number(name: str, value: Any, or_none: bool = False) -> None:
    """
    Raises:
        `TypeError`: `value` is no number (a text or a bool is none), nor None, with `or_none`.
    """
    if not is_number(value) and not (or_none and value is None):
        raise TypeError(f"{name}={value!r} is not a number{' or None' if or_none else ''}.")


def boolean(name: str, value: Any, or_none: bool = False) -> None:
    """
    Raises:
        `TypeError`: `value` is not True or False (or None, with `or_none`).
    """
    if not isinstance(value, bool) and not (or_none and value is None):
        raise TypeError(f"{name}={value!r} is not True or False{' or None' if or_none else ''}.")


def is_number(value: Any) -> bool:
    """Whether `value` is a number, of Python or of a library; a text or a bool is none."""
    return not isinstance(value, (bool, str)) and hasattr(value, "__float__")
