"""What ranks that save or load together tell each other: sums, whose error it was, and that they are still there."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hp_sharding import CheckpointError
from hp_sharding.checkpoint import ranks
from hp_sharding.checkpoint.ranks import Ranks, _Signs
from tests.seats import Seat, _Table


def _sums_of_both(where: str) -> list[list[int]]:
    """What two ranks, threads of this process, find to be the sum, over data or over tensor-parallel ranks."""
    table, found = _Table(2), [[0], [0]]

    def run(rank: int) -> None:
        own, seat = Ranks(None), Seat("lane", (0, 1), rank, table)
        own._agree, own._tensor = ([seat], None) if where == "data" else ([], seat)
        found[rank] = own.sum_of(np.array([1, 10 + rank], np.int32)).tolist()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return found


@pytest.mark.parametrize("where", ["data", "tensor"])
def test_all_ranks_are_summed_over(where: str) -> None:
    assert _sums_of_both(where) == [[2, 21], [2, 21]]


class _OfTwo(Ranks):
    """The first of two ranks, of which the other one has failed, or not."""

    n_ranks = 2

    def __init__(self, *, has_failed: bool) -> None:
        super().__init__(None)
        self._has_failed = has_failed

    def sum_of(self, values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return values + np.array([0, self._has_failed], np.int32)

    def text_of(self, rank: int, text: str) -> str:
        assert rank == 1
        return {"None": "its words", "": "its parameter"}[text]  # this one has neither an error nor a parameter


def test_what_fails_on_one_rank_fails_on_all_with_its_words() -> None:
    with (
        pytest.raises(CheckpointError, match=r"^rank 1 of 2: its words$") as caught,
        _OfTwo(has_failed=True).together(),
    ):
        pass
    assert caught.value.parameter == "its parameter"
    with _OfTwo(has_failed=False).together():
        pass


def test_who_is_through_waits_for_the_others() -> None:
    own: Any = Ranks(None)
    others = threading.Event()

    def sum_over_data(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        others.wait(20.0)
        return np.array([0], np.int32)

    own._sum_over_data = sum_over_data
    signs = _Signs(own)
    threading.Timer(0.2, others.set).start()
    signs.end()
    assert others.is_set()
    signs.end()


class _Clock:
    """An event that is never set and notes how long it was waited for."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []

    def wait(self, timeout: float) -> bool:
        self.pauses_s.append(timeout)
        return False

    def is_set(self) -> bool:
        return False


def test_signs_of_life_come_rarely_and_often_enough() -> None:
    """At first soon, since most is over soon; then ever later, but four times as often as anybody gives up."""
    signs: Any = _Signs.__new__(_Signs)
    signs._ranks, signs._over, signs._error = Ranks(None), _Clock(), None
    signs._ranks.timeout_s = 1.0
    others = iter([1, 1, 1, 1, 1, 1, 0])
    signs._ranks._sum_over_data = lambda values: np.array([next(others)], np.int32)
    signs._run()
    first_s = ranks._FIRST_SIGN_S
    assert signs._over.pauses_s == [first_s, 2 * first_s, 4 * first_s, 8 * first_s, 0.25, 0.25, 0.25]
