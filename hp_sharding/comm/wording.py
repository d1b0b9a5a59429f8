"""How messages call a collective: what it does, and the layers that its bucket belongs to."""

from __future__ import annotations

import re

_OF_BUCKETS = re.compile(r"\d+:(?P<first>[^,]+?)(?: to \d+:(?P<last>[^,]+))?(?:, .*)?")
"""Labels that name a bucket, as ``layout`` does, or the first and the last of several, and what is done with them."""


def called(what: str, nbytes: int, label: str) -> str:
    """Names a collective.

    Args:
        what: its kind, such as ``"all_gather"``.
        nbytes: see ``Work``.
        label: see ``Work``; where it names a bucket, the layers are named as well.
    """
    return f"{what} of {nbytes} bytes labelled {label!r}{_layers(label)}"


def different_ways(lane: str, number: int, mine: tuple[int, str], theirs: tuple[int, str]) -> str:
    """Says that two ranks differ in what they start as one collective of a lane.

    Args:
        lane: name of the lane.
        number: of the collective, on its lane.
        mine: a rank, and what it has, as ``called`` has it.
        theirs: the same of the other one.
    """
    return (
        f"the ranks have gone different ways: as collective {number} of lane {lane!r} rank {mine[0]} has {mine[1]}, "
        f"rank {theirs[0]} has {theirs[1]}; all ranks must start the same collectives in one order"
    )


def _layers(label: str) -> str:
    found = _OF_BUCKETS.fullmatch(label)
    if found is None:
        return ""
    first, last = found["first"].partition("..")[0], (found["last"] or found["first"]).rpartition("..")[2]
    return f", of layer {first!r}" if first == last else f", of layers {first!r} to {last!r}"
