"""What users of lanes hold, so that lanes which nobody uses any more can end by themselves.

The threads of a lane hold it, so it is never found unused. Users get a second object with the very same attributes
instead, which the threads do not know. When the last reference to it is gone, so is the last user. A collective that
has been started is a user as well: it holds the object that it was started on until it is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

from .communicator import Communicator

Lane = TypeVar("Lane", bound=Communicator)


def handle(lane: Lane, dropped: Callable[[str], object]) -> Lane:
    """Another object that is the same communicator.

    Args:
        lane: the communicator.
        dropped: called with the lane's name once nobody has the new object any more. That may be in any thread, in the
            middle of anything, under any lock: it must take none, not wait, and not raise.
    """
    twin: Lane = object.__new__(type(lane))
    # One and the same: whichever of the two is used, both change.
    twin.__dict__ = lane.__dict__
    # The end of the process closes all lanes anyway.
    weakref.finalize(twin, dropped, lane.lane).atexit = False
    return twin
