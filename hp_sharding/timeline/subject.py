"""What a timeline knows of the run that it records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..trace.figures import Groups
from .meeting import Way

if TYPE_CHECKING:
    from ..comm import Work


class Subject:
    """A run of one rank of which nothing is known; ``recorded`` has those that there are.

    Attributes:
        rank: global rank.
        groups: how many ranks a message goes to.
        ways: lanes that one after the other reach all ranks, from the first one on.
        timeout_s: how long a late rank, or a device that is behind, is waited for.
        whole: the model's class.
    """

    rank: int = 0
    groups: Groups = Groups(1, 1)
    ways: Sequence[Way] = ()
    timeout_s: float = 300.0
    whole: str = ""

    @property
    def layers(self) -> Mapping[str, str]:
        """Bucket's name -> its layers, as the user knows them: ``"blocks.3"``, or ``"blocks.3..blocks.5"``."""
        return {}

    def begin(self) -> None:
        """The timeline records from here on."""

    def end(self) -> None:
        """It does not any more."""

    def layers_of(self, buckets: Sequence[int]) -> str:
        """Layers of these buckets, as a range."""
        return ""

    def under_way(self) -> list[Work]:
        """Collectives under way."""
        return []

    def held_bytes(self) -> int:
        """Bytes of model state that are held now; see ``docs/timeline.md``."""
        return 0

    def formula_bytes(self) -> int:
        """Bytes of model state by the formula."""
        return 0

    def about(self) -> dict[str, Any]:
        """The run, for a trace; see ``trace.spans.Trace``."""
        return {}


RUNNING_STATE = "running state"
"""How the labels of works begin that carry it; what stands behind it is long."""


def layer_of(label: str, layers: Mapping[str, str]) -> str:
    """The layers of what a work of that label carries; where it is no bucket's, what it is, such as ``"agreement"``.

    Labels are a bucket's name, that and ``", backward 3"``, or two of them and ``" to "`` between.
    """
    name = label.rpartition(", backward ")[0] or label
    if name in layers:
        return layers[name]
    first, _, last = name.partition(" to ")
    if first in layers and last in layers:
        return range_of([layers[first], layers[last]])
    return RUNNING_STATE if name.startswith(RUNNING_STATE) else name


def is_bucket(label: str, layers: Mapping[str, str]) -> bool:
    """Whether that is the label of a work that carries buckets."""
    name = label.rpartition(", backward ")[0] or label
    return name in layers or name.partition(" to ")[0] in layers


def range_of(layers: Sequence[str]) -> str:
    """From the first of some layers, or of ranges of such, to the last one."""
    first, last = layers[0].partition("..")[0], layers[-1].rpartition("..")[2]
    return first if first == last else f"{first}..{last}"
