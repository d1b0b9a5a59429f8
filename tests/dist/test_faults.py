"""One rank dies, stops, raises, leaves, is late, or loses its link, in some phase: nobody hangs, and it is named.

All of it: ``scripts/soak faults``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from benchmarks import links
from tests import faults
from tests.faults import Case, Seen, places

AT_ONCE = 3
"""So many cases: most of the time they wait."""

CASES = [
    Case("killed", "forward", stage=3, rank=0),
    Case("killed", "step", stage=2),
    Case("killed", "saving", stage=3, rank=3, n_replicas=2, nranks=4),
    Case("stopped", "backward", stage=2),
    Case("stopped", "wrapping", rank=0),
    Case("raises", "backward", stage=3),
    Case("raises", "loading", stage=1, rank=0),
    Case("exits", "evaluating", stage=3, rank=0),
    Case("late", "before step", stage=1),
    Case("killed", "backward", stage=1, way="launcher"),
    Case("stopped", "forward", stage=3, rank=0, way="launcher"),
    Case("cut", "step", stage=2, way="hosts"),
    Case("cut", "forward", stage=3, rank=0, way="hosts"),
]


@pytest.fixture(scope="module")
def suffered(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[Seen]]]:
    """Runs the cases that were asked for, several at a time."""
    asked = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    reason = links.available() if any(case.way == "hosts" for case in asked) else None
    possible = [case for case in asked if case.way != "hosts" or reason is None]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as executor:
        yield {case: executor.submit(faults.suffer, case, stack.enter_context(places(case))) for case in possible}
        executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nobody_hangs_and_it_is_named(case: Case, suffered: dict[Case, Future[Seen]]) -> None:
    if case not in suffered:
        warnings.warn("a link that goes down was NOT tested: that needs root and the ip command", stacklevel=1)
        pytest.skip("a link can be taken down only by root, with the ip command")
    seen = suffered[case].result()
    assert faults.wrongs(case, seen) == [], seen.logs
