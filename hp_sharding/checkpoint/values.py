"""Plain values, and arrays among them, as JSON and back: what a checkpoint holds besides the model's tensors.

Nothing is pickled, so that loading a checkpoint can never run code. JSON has fewer types than Python: what it lacks is
an object with the key ``$``, which names the type::

    None, bool, str, list, finite float, int of 64 bits     as they are
    dict whose keys are str, none of them "$"               an object
    any other dict                                          {"$": "dict", "items": [[key, value], ...]}
    tuple, set, frozenset                                   {"$": "tuple", "items": [...]}
    larger int, nan and infinities                          {"$": "int", "hex": "0x..."}, {"$": "float", "hex": "nan"}
    complex                                                 {"$": "complex", "hex": [real, imaginary]}
    bytes, bytearray                                        {"$": "bytes", ...content}
    NumPy's arrays and scalars, Paddle's tensors            {"$": "array", "dtype": "float32", "shape": [2], ...content}

Content is ``"base64": ...`` where it is small, and else ``"tensor": name``: it is a tensor of the checkpoint.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .source import STORAGE, TensorInfo

Array = npt.NDArray[Any]

_INLINE_BYTES = 1024
"""Larger ones become tensors of a data file: an index of many ranks stays small, and is read by all of them."""
_MAX_DEPTH = 100
"""Lists in lists; what contains itself is deeper than any."""
_KINDS = "biufcSUMm"
"""Of NumPy's dtypes: all but objects, which could only be pickled, and records."""
_TENSORS = (*STORAGE, "complex64", "complex128")
"""Of Paddle's dtypes: those that come and go through NumPy."""
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS = (dict, OrderedDict, defaultdict)
_INSTEAD = {
    "Enum": "its .value",
    "Namespace": "vars(...) of it",
    "PurePath": "str(...) of it",
    "date": "its .isoformat()",
    "deque": "list(...) of it",
    "Generator": "its .bit_generator.state",
    "tuple": "tuple(...) of it",
    "list": "list(...) of it",
    "dict": "dict(...) of it",
    "ndarray": "numpy.asarray(...) of it, or its parts",
    "str": "str(...) of it",
    "int": "int(...) of it",
    "Layer": "its state_dict()",
    "Optimizer": "its state_dict()",
    "LRScheduler": "its state_dict()",
}
"""Name of a class or of one of its bases -> what to save instead."""


class Encoded(NamedTuple):
    """A value as JSON, and the arrays in it that are too large for that.

    ``arrays`` has C order and own memory, copied at the time of ``encode``, and dtypes of ``STORAGE``; uint16, which is
    not one of them, are the bits of bfloat16. ``info`` says what each is as a tensor.
    """

    json: Any
    arrays: dict[str, Array]


def encode(value: Any, *, where: str, prefix: str = "state/") -> Encoded:
    """``value`` as JSON and arrays; ``decode`` gives it back, with the same types.

    It may hold None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, NumPy's
    scalars and arrays, and Paddle's tensors, in each other as deep as anyone writes. ``OrderedDict`` and
    ``defaultdict`` come back as dict, parameters as tensors.

    Args:
        value: what to encode; it is not changed, and may change afterwards.
        where: what to call it in errors, such as ``"extra"``.
        prefix: what names of arrays begin with, before a number; a logical name, as in ``source``.

    Raises:
        CheckpointError: there is something else in it; names the place, such as ``extra['sampler'][0]``, and the type.
    """
    encoder = _Encoder(prefix)
    return Encoded(encoder.encode(value, where, 0), encoder.arrays)


def decode(encoded: Any, arrays: Mapping[str, Array]) -> Any:
    """The value that ``encode`` was given, in memory of its own. Tensors come to the current device, without gradients.

    Args:
        encoded: ``Encoded.json``, possibly written and read since.
        arrays: ``Encoded.arrays``; they may be flattened.

    Raises:
        CheckpointError: what is not known, or an array that is not there.
    """
    if isinstance(encoded, list):
        return [decode(item, arrays) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "$" not in encoded:
        return {key: decode(item, arrays) for key, item in encoded.items()}
    return _decode_tagged(encoded, arrays)


def info(array: Array) -> TensorInfo:
    """What one of ``Encoded.arrays`` is as a tensor of a checkpoint."""
    return TensorInfo(array.shape, "bfloat16" if array.dtype == np.uint16 else array.dtype.name)


def tensor_names(encoded: Any) -> list[str]:
    """Names of the arrays that ``decode`` will look up, in the order in which they come."""
    if isinstance(encoded, Mapping):
        own = [encoded["tensor"]] if "$" in encoded and "tensor" in encoded else []
        return own + [name for item in encoded.values() for name in tensor_names(item)]
    return [name for item in encoded for name in tensor_names(item)] if isinstance(encoded, list) else []


def digest(encoded: Encoded) -> int:
    """A checksum (crc32): the same on two ranks whose values are equal, whatever the order of their dicts and sets."""
    plain = _canonical(encoded.json, {name: zlib.crc32(array.tobytes()) for name, array in encoded.arrays.items()})
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


# -- there -------------------------------------------------------------------------------------------------------------


class _Encoder:
    """Collects the arrays of one value."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.arrays: dict[str, Array] = {}

    def encode(self, value: Any, where: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{where[:200]}... is nested more than {_MAX_DEPTH} deep; does it contain itself?")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float, complex):
            return _encode_number(value)
        if kind in (bytes, bytearray):
            return {"$": kind.__name__, **self._content(np.frombuffer(value, np.uint8).copy())}
        if kind is list or kind in _SEQUENCES.values():
            return self._encode_sequence(value, where, depth)
        if kind in _DICTS:
            return self._encode_dict(value, where, depth)
        return self._encode_array(value, where)

    def _encode_sequence(self, value: Any, where: str, depth: int) -> Any:
        items = [self.encode(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$": type(value).__name__, "items": items}

    def _encode_dict(self, value: Mapping[Any, Any], where: str, depth: int) -> Any:
        places = {key: f"{where}[{key!r}]" if where else str(key) for key in value}
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: self.encode(item, places[key], depth + 1) for key, item in value.items()}
        items = []
        for key, item in value.items():
            place = f"the key {key!r} of {where}"
            items.append([self.encode(key, place, depth + 1), self.encode(item, places[key], depth + 1)])
        return {"$": "dict", "items": items}

    def _encode_array(self, value: Any, where: str) -> Any:
        if type(value) is np.ndarray or isinstance(value, np.generic):
            array, form = np.asarray(value), {} if isinstance(value, np.ndarray) else {"scalar": True}
            dtype = array.dtype.name if array.dtype.isnative and array.dtype.kind in "biufc" else array.dtype.str
        elif _is_tensor(value):
            array, form, dtype = _numpy_of(value, where), {"paddle": True}, str(value.dtype).removeprefix("paddle.")
        else:
            raise _refused(value, where)
        if array.dtype.kind not in _KINDS or (form.get("paddle") and dtype not in _TENSORS):
            raise CheckpointError(
                f"{where} is an array of {dtype}, which a checkpoint does not hold: it has no pickles, so that loading "
                "it can never run code. Save its parts as lists or as arrays of numbers"
            )
        shape = list(array.shape)
        if not _is_stored(array, dtype):
            array = np.frombuffer(array.tobytes(), np.uint8)
        return {"$": "array", "dtype": dtype, "shape": shape, **form, **self._content(array.copy(order="C"))}

    def _content(self, array: Array) -> dict[str, str]:
        if array.nbytes <= _INLINE_BYTES:
            return {"base64": base64.b64encode(array.tobytes()).decode()}
        name = f"{self._prefix}{len(self.arrays)}"
        self.arrays[name] = array
        return {"tensor": name}


def _encode_number(value: float | complex) -> Any:
    if isinstance(value, complex):
        return {"$": "complex", "hex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, int):
        # Beyond 64 bits other readers of JSON give up, and Python at 4300 digits.
        return value if -(2**63) <= value < 2**63 else {"$": "int", "hex": hex(value)}
    return value if math.isfinite(value) else {"$": "float", "hex": value.hex()}


def _is_stored(array: Array, dtype: str) -> bool:
    """Whether it can be a tensor as it is; what cannot is one of bytes."""
    return dtype in STORAGE and STORAGE[dtype] == array.dtype


def _is_tensor(value: Any) -> bool:
    # Without Paddle there can be no tensor; and the command line need not wait for its import.
    paddle = sys.modules.get("paddle")
    return paddle is not None and isinstance(value, paddle.Tensor)


def _numpy_of(tensor: Any, where: str) -> Array:
    array: Array = np.asarray(tensor.numpy())
    if array.shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{where} is a tensor of shape {list(tensor.shape)} whose value is not here, such as a parameter that is "
            "sharded; the model's own parameters are in the checkpoint already, and anything made of them is to be "
            "read inside hp_sharding.full_parameters"
        )
    return array


def _refused(value: Any, where: str) -> CheckpointError:
    kind = type(value)
    instead = next((_INSTEAD[base.__name__] for base in kind.__mro__ if base.__name__ in _INSTEAD), None)
    if hasattr(kind, "__dataclass_fields__"):
        instead = "dataclasses.asdict(...) of it"
    return CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint does not hold: it has no pickles, so "
        "that loading it can never run code. What it holds are None, bool, int, float, complex, str, bytes, list, "
        f"tuple, set, dict, NumPy arrays and Paddle tensors. Save {instead or 'what it is made of'} instead"
    )


# -- and back ----------------------------------------------------------------------------------------------------------


def _decode_tagged(encoded: Mapping[str, Any], arrays: Mapping[str, Array]) -> Any:
    kind = encoded["$"]
    if kind == "dict":
        return {decode(key, arrays): decode(item, arrays) for key, item in encoded["items"]}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, arrays) for item in encoded["items"])
    if kind == "int":
        return int(encoded["hex"], 16)
    if kind == "float":
        return float.fromhex(encoded["hex"])
    if kind == "complex":
        return complex(*map(float.fromhex, encoded["hex"]))
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(_content_of(encoded, arrays))
    if kind == "array":
        return _decode_array(encoded, arrays)
    raise CheckpointError(f"a value of the kind {kind!r}, which this version of hp_sharding does not know: update it")


def _decode_array(encoded: Mapping[str, Any], arrays: Mapping[str, Array]) -> Any:
    name = encoded["dtype"]
    dtype = STORAGE[name] if name in STORAGE else np.dtype(name)
    if dtype.kind not in _KINDS:
        raise CheckpointError(f"the checkpoint's state has an array of {name}, which it cannot hold: it is damaged")
    array: Array = np.ndarray(encoded["shape"], dtype, _content_of(encoded, arrays)).copy()
    if encoded.get("scalar"):
        return array[()]
    return _tensor_of(array, name) if encoded.get("paddle") else array


def _tensor_of(array: Array, dtype: str) -> Any:
    import paddle  # only where there are tensors

    return paddle.to_tensor(array, dtype=dtype)


def _content_of(encoded: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    if "base64" in encoded:
        return base64.b64decode(encoded["base64"])
    if encoded["tensor"] not in arrays:
        raise CheckpointError(
            f"the checkpoint's state refers to {encoded['tensor']}, which is not in it", parameter=encoded["tensor"]
        )
    return arrays[encoded["tensor"]].tobytes()


# -- the same, and not the same ----------------------------------------------------------------------------------------


def _canonical(encoded: Any, sums: Mapping[str, int]) -> Any:
    """The same for equal values: dicts in one order, arrays by their checksums instead of by name."""
    if isinstance(encoded, list):
        return [_canonical(item, sums) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    plain = {key: _canonical(item, sums) for key, item in encoded.items() if key != "tensor" or "$" not in encoded}
    if "$" in encoded and "tensor" in encoded:
        plain["crc32"] = sums[encoded["tensor"]]
    if encoded.get("$") in ("dict", "set", "frozenset"):
        plain["items"] = sorted(plain["items"], key=lambda item: json.dumps(item, sort_keys=True))
    return plain
