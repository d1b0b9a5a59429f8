"""Every exception that hp_sharding raises on purpose.

::

    HpShardingError (RuntimeError)
    ├── ConfigError (ValueError)   a wrong flag, argument or order of calls; raised before any collective
    ├── LayoutError                the wrapped model changed in a way its buckets cannot follow
    ├── StateError                 a call that the bucket's state does not allow, or a value that is not there
    ├── CheckpointError            a checkpoint that cannot be written, is incomplete or damaged, or does not fit
    └── CommError                  a collective failed, or a peer is late beyond ``timeout_s`` or gone

Messages name the rank, the bucket or parameter, what was expected, what was found, and what to do.
An ``AssertionError`` from this package is a defect of the package, never of the caller.
"""

from __future__ import annotations


class HpShardingError(RuntimeError):
    """Base of all errors raised by hp_sharding."""


class ConfigError(HpShardingError, ValueError):
    """A setting, an argument or an order of calls that cannot work.

    Raised before any collective starts, so every rank that made the same mistake sees it and none hangs.
    """


class LayoutError(HpShardingError):
    """The model no longer matches the layout it was wrapped with (a parameter cast, resized or added)."""


class StateError(HpShardingError):
    """An operation that the current state forbids, such as reading the value of a freed parameter."""


class CheckpointError(HpShardingError):
    """A checkpoint that cannot be written, is incomplete, damaged or of a newer version, or does not fit the model.

    While loading it is raised on every rank, before anything in memory has changed, unless the message says otherwise.

    Attributes:
        file: the file at fault, where there is one.
        parameter: the parameter or other tensor concerned, by structured name, where there is one.
    """

    def __init__(self, message: str, *, file: str = "", parameter: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.parameter = parameter


class CommError(HpShardingError):
    """A collective that failed, timed out, or lost a peer.

    Attributes:
        op: the collective, such as ``"reduce_scatter"``.
        label: what it carried, usually a bucket's name.
        lane: the communicator it ran on, such as ``"gather"``.
        rank: the global rank that raises.
        peer: the global rank at fault, where it is known.
    """

    def __init__(
        self, message: str, *, op: str = "", label: str = "", lane: str = "", rank: int = -1, peer: int | None = None
    ) -> None:
        super().__init__(message)
        self.op = op
        self.label = label
        self.lane = lane
        self.rank = rank
        self.peer = peer
