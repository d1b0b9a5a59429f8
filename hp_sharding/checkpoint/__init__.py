"""Checkpoints: saved by all ranks together, each its share, and loaded into any other number of them.

From the model down to the disk::

    saving, loading, whole       the calls: save, load, save_full and load_full
    ranks                        who takes part; all succeed or all fail
    held, shares, matching       what is here, what of it this rank writes, what of a source fits it
    blocks, rng, schedulers      tensors, generators and schedulers, out and in
    source, values               in the middle: logical tensors, and plain values beside them
    folder, opened, index,       a checkpoint: one data file a rank, the index last;
      tensor_file, durable         written and read
    whole_files, full_state      ordinary files of whole tensors:
    paddle_files, paddle_names,    .pdparams and .pdopt,
      pickled, unpickled, pickle_machine
    safetensors_files              safetensors,
    lazy, beside                   read in parts, and put in place when they are complete
    converting, contents,        the command line
      terminal, command
"""

from __future__ import annotations

from .folder import latest_checkpoint
from .loading import Loaded, load
from .saving import PendingSave, save
from .whole import load_full, save_full

__all__ = ["Loaded", "PendingSave", "latest_checkpoint", "load", "load_full", "save", "save_full"]
