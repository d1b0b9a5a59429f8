"""What users hand to public calls, looked at before anything starts: a wrong value becomes a ``ConfigError``.

The message begins with the name of the argument, and says what was given and what was expected.
"""

from __future__ import annotations

import math
import numbers
import os

import numpy as np

from .errors import ConfigError

_SHOWN_CHARS = 120
"""Of a value in a message: a tensor or a checkpoint's state is longer than any terminal."""


def shown(value: object) -> str:
    """``repr(value)`` for a message: on one line, not too long, and never an error of its own."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - of a freed parameter, say, or of a number of too many digits
        return f"<a {type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def wrong_value(name: str, value: object, expected: str) -> ConfigError:
    """What to raise where ``value`` was given for ``name``, and ``expected`` says what it should be."""
    return ConfigError(f"{name}={shown(value)} ({type(value).__name__}): expected {expected}")


def as_flag(name: str, value: object, expected: str = "True or False") -> bool:
    """``value`` as Python's bool. A number is none, and a string that is not empty must not pass for True."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_value(name, value, expected)
    return bool(value)


def as_number(name: str, value: object, expected: str) -> int | float:
    """``value`` as a Python number that a float can hold; it may be NaN or infinite.

    np.bool_ is no numbers.Real, and bool, which is one, must not pass for 0 or 1.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_value(name, value, expected)
    try:
        number = float(value)
    except OverflowError:
        raise wrong_value(name, value, expected) from None
    return int(value) if isinstance(value, numbers.Integral) else number


def as_positive(name: str, value: object, expected: str, *, most: float = math.inf) -> int | float:
    """``value`` as a finite Python number above zero, and not above ``most``."""
    number = as_number(name, value, expected)
    if not 0 < number <= most or math.isinf(number):
        raise wrong_value(name, value, expected)
    return number


def as_path(name: str, value: object, expected: str) -> str:
    """``value``, a string or a path object, as a string that the system takes for a path. Looks at no disk."""
    path = value if isinstance(value, (str, os.PathLike)) else ""
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text or not _is_encodable(text):
        raise wrong_value(name, value, expected)
    return text


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
