"""Slow work of coming tests, done on the other cores while the present one runs."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import pytest

Key = TypeVar("Key")
Made = TypeVar("Made")


class Ahead(Generic[Key, Made]):
    """A function whose values for known keys are made in advance, in threads (compilers release the lock).

    Under pytest-xdist each worker has one core and knows only what it runs next, so there the work waits until it
    is asked for.
    """

    def __init__(self, make: Callable[[Key], Made], keys: Sequence[Key], config: pytest.Config) -> None:
        self._make, self._pool = make, ThreadPoolExecutor(os.cpu_count() or 1)
        self._started: dict[Key, Future[Made]] = {}
        if not hasattr(config, "workerinput"):
            for key in keys:
                self._start(key)

    def __call__(self, key: Key) -> Made:
        """The value, or the error that making it raised."""
        return self._start(key).result()

    def _start(self, key: Key) -> Future[Made]:
        if key not in self._started:
            self._started[key] = self._pool.submit(self._make, key)
        return self._started[key]

    def close(self) -> None:
        """Give up what nobody asked for."""
        self._pool.shutdown(cancel_futures=True)


def parameters(request: pytest.FixtureRequest, function: str) -> list[dict[str, object]]:
    """The parameters of all tests of one function that this run has selected, in order."""
    return [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == function
        and item.path == request.path
        and hasattr(item, "callspec")
    ]
