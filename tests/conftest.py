"""Settings for every test: Paddle's environment before its import, and the end of the reused rank processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import harness

os.environ.update(harness.machine_env())


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    harness.close_all()
