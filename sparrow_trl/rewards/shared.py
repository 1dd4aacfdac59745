"""What the reward functions of a process share: made on first use, once, whichever thread asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar


Made = TypeVar("Made")


def made_once(make: Callable[[], Made]) -> Callable[[], Made]:
    """A function that returns what the first call of `make` returned."""
    lock, cached = threading.Lock(), lru_cache(maxsize=1)(make)

    @wraps(make)
    def get() -> Made:
        with lock:
            return cached()

    return get
