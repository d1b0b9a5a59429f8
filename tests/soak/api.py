"""Programs of calls of the public API, drawn at random: sharded, they do what plain Paddle does."""

from __future__ import annotations

import traceback

from tests.dist import test_api_machine
from tests.soak.starts import Split


def run_many(count: int, split: Split, stage: int) -> str:
    """Runs so many programs. Returns what went wrong, with the smallest program that shows it; empty for nothing."""
    given = {"stage": stage} if split.nranks == 1 else {"stage": stage, "n_replicas": split.n_replicas}
    try:
        test_api_machine.run(split.nranks, count, given, at_random=True)
    except Exception as error:  # noqa: BLE001 - of any kind; the program that hypothesis has found stands in its notes
        notes = getattr(error, "__notes__", [])
        return "\n".join(["".join(traceback.format_exception(error)), *notes])
    return ""
