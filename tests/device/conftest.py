"""Without what builds the stand-in device its tests are skipped, with a warning that no summary leaves out."""

from __future__ import annotations

import warnings

import pytest

from tests.device import standin


@pytest.fixture(scope="session")
def standin_device() -> None:
    """Skips what needs the device where there is none; else builds it, so that no test's time goes into that."""
    reason = standin.why_missing()
    if reason is not None:
        warnings.warn(f"nothing was tested on the stand-in device: {reason}", stacklevel=1)
        pytest.skip(f"no stand-in device: {reason}")
    standin.built()
