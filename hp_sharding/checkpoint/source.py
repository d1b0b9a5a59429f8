"""Where a load gets its values from: named, logical tensors, of which any range of elements can be read.

A sharded checkpoint is one such source, Paddle's ``.pdparams`` and ``.pdopt`` another, safetensors files a third.
Logical names are made of structured names, with ``/`` between the parts:

* ``model/<structured name>``: a parameter or a persistable buffer. Of a parameter with a float32 master, that.
* ``optimizer/<structured name>/<moment>``: what the optimizer keeps of a parameter, such as ``moment1``; of the
  parameter's shape, of that with one more axis before it, or, where it belongs to the parameter as a whole such as a
  power of beta, of one element.
* ``state/<number>`` and ``rank/<rank>/state``: tensors in what else was saved, and what each rank has of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

MODEL = "model/"
OPTIMIZER = "optimizer/"
STATE = "state/"
SPLIT_MARK = "#tensor"
"""Behind the name of a parameter that tensor parallelism has split: ``#tensor1of2``."""
STORAGE: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")},
    "bool": np.dtype(np.bool_),
    "bfloat16": np.dtype(np.uint16),
}
"""Paddle's names of the dtypes that can be stored, and how numpy holds them: bfloat16 as bits."""
SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
}  # fmt: skip
"""What safetensors files call each of them."""


class TensorInfo(NamedTuple):
    """Shape and dtype of a logical tensor; ``dtype`` is one of ``STORAGE``."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * STORAGE[self.dtype].itemsize


class TensorSource(Protocol):
    """Something that can be loaded from."""

    @property
    def where(self) -> str:
        """What to call it in errors: its path."""

    @property
    def identity(self) -> str:
        """Tells what was opened from anything else, in a word: the same on all ranks that opened the same thing."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Logical name -> shape and dtype. Tied parameters are there once."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other logical names of tied parameters -> the name under which they are stored."""

    @property
    def state(self) -> Mapping[str, Any]:
        """What is not tensors, decoded; see ``saving.state_of``. Empty where the source has nothing of the kind."""

    def read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements ``start`` to ``stop`` of the flattened tensor, one-dimensional, of ``STORAGE[dtype]``; own memory.

        Raises:
            CheckpointError: the file cannot be read any more; names file and tensor.
        """

    def file_of(self, name: str, element: int = 0) -> str:
        """The file in which that element lies, for errors."""

    def verify(self, part: int = 0, n_parts: int = 1) -> None:
        """Reads the given one of ``n_parts`` shares of all stored bytes, of about the same size, and checks them.

        Raises:
            CheckpointError: the first byte that is not what was written; names file and tensor.
        """

    def check(self, name: str) -> None:
        """Verifies one tensor; errors as of ``verify``."""

    def close(self) -> None:
        """Lets go of open files. Safe to call twice."""
