"""Checkpoints: saved by all ranks together, each its share, and loaded into any other number of them.

``saving`` and ``loading`` are the two directions; ``whole`` reads and writes Paddle's ordinary files. What a rank holds
is in ``held``, and a folder of files with its index in ``folder``; between the two stands ``source``, logical tensors
that know neither.
"""

from __future__ import annotations

from .folder import latest_checkpoint
from .loading import Loaded, load
from .saving import PendingSave, save
from .whole import load_full, save_full

__all__ = ["Loaded", "PendingSave", "latest_checkpoint", "load", "load_full", "save", "save_full"]
