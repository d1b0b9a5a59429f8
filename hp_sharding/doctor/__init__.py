"""``python -m hp_sharding doctor``: what a user runs when something is slow or wrong.

``examination`` runs the checks on all ranks, each in a module of its own: what a rank measures (``measure``), and what
all measurements together say (``conclude``). ``ranks`` is how they reach each other, ``report`` what comes of it,
``terminal`` how it looks; ``starting`` starts the ranks where nobody else did.
"""

from __future__ import annotations

from .report import Request
from .visit import run

__all__ = ["Request", "run"]
