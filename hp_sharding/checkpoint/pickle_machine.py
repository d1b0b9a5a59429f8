"""The small programs that pickles are, interpreted without running anything of Python's.

The machine knows the operations that numbers, texts, lists, tuples, sets and dicts need, and calls only what it was
given to stand for the functions that a pickle names. Whatever else a pickle asks for is an error. Protocols 2 to 5.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .lazy import Coding, OpenFile, Payload

_SMALL_BYTES = 256
"""Larger texts and byte strings stay in the file until it is known what they are; beyond this no name is long."""
_BUFFER_BYTES = 1 << 16
_KEYS = (str, int, float, bool, bytes, type(None))


class Global(NamedTuple):
    """A class or function that a pickle names. It is never looked up."""

    module: str
    name: str


class Built:
    """What a function stands for whose result gets a state later."""

    def build(self, state: Any) -> None:
        """Takes the state. Whatever it raises is the file's fault."""
        raise NotImplementedError


MEANINGLESS = (
    IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, struct.error,
)  # fmt: skip
"""What is raised where a pickle does not make sense."""


class Machine:
    """Interprets one file.

    Args:
        file: the pickle.
        calls: what stands for the functions that may be called.
        classes: what may be named, but not called.

    Attributes:
        at: byte of the file that comes next.
    """

    def __init__(self, file: OpenFile, calls: Mapping[Global, Callable[..., Any]], classes: Collection[Global]) -> None:
        self._file, self._calls, self._classes = file, calls, classes
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._below: list[list[Any]] = []  # stacks under the marks
        self._buffer, self._buffer_at, self.at = b"", 0, 0

    def run(self) -> Any:
        """What the pickle stands for.

        Raises:
            CheckpointError: it is cut off, or names what is not known.
            MEANINGLESS: it makes no sense.
        """
        if self.read(1) != pickle.PROTO or self.read(1)[0] not in range(2, 6):
            raise ValueError("it does not begin as a pickle of protocol 2 to 5")
        while (code := self.read(1)) != pickle.STOP:
            if code not in _ACTIONS:
                raise ValueError(f"operation {code!r}")
            _ACTIONS[code](self)
        if len(self.stack) != 1 or self._below or self.at != self._file.nbytes:
            raise ValueError("it ends too early")
        return self.stack[0]

    def read(self, nbytes: int) -> bytes:
        """The next bytes of the file, of which there are few."""
        start = self.at - self._buffer_at
        if start + nbytes > len(self._buffer):
            size = min(max(nbytes, _BUFFER_BYTES), self._file.nbytes - self.at)
            if size < nbytes:
                raise self._error(f"ends in the middle of something at byte {self.at}: it is cut off; use a copy")
            self._buffer, self._buffer_at, start = self._file.read(self.at, size), self.at, 0
        self.at += nbytes
        return self._buffer[start : start + nbytes]

    def number(self, form: str) -> int:
        """The next bytes as a number; ``form`` as in ``struct``."""
        return struct.unpack(form, self.read(struct.calcsize(form)))[0]

    def line(self) -> str:
        """Up to the end of the line."""
        found = bytearray()
        while (byte := self.read(1)) != b"\n":
            found += byte
            if len(found) > _SMALL_BYTES:
                raise ValueError("a name without end")
        return found.decode()

    def payload(self, nbytes: int, *, coding: Coding = "bytes") -> Payload:
        """Steps over the next bytes."""
        if not 0 <= nbytes <= self._file.nbytes - self.at:
            raise self._error(f"is cut off: {nbytes} bytes from byte {self.at} on are {self._file.nbytes - self.at}")
        self.at += nbytes
        return Payload(self.at - nbytes, nbytes, coding)

    def mark(self) -> None:
        """What is pushed from now on belongs together."""
        self._below.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """What lies above the last mark."""
        above, self.stack = self.stack, self._below.pop()
        return above

    def call(self, function: Any, arguments: Any) -> Any:
        """What a function of ours gives in place of the one that is named."""
        if not isinstance(function, Global) or not isinstance(arguments, tuple) or function not in self._calls:
            raise TypeError(f"a call of {function}"[:100])
        return self._calls[function](*arguments)

    def find(self, module: str, name: str) -> Global:
        """What is named, if it is known."""
        found = Global(module, name)
        if found not in self._calls and found not in self._classes:
            raise self._error(
                f"refers to {module}.{name}, which no state dict needs. Nothing was run. If you trust the file, load "
                "it with paddle.load and save only model.state_dict() or optimizer.state_dict() again",
            )
        return found

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path} {what}", file=self._file.path)


def _skip_frame(machine: Machine) -> None:
    machine.read(8)  # how much an unpickler may read ahead


def _push(value: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


def _bytes(form: str) -> Callable[[Machine], None]:
    """Bytes whose length comes first."""

    def act(machine: Machine) -> None:
        nbytes = machine.number(form)
        machine.stack.append(machine.read(nbytes) if 0 <= nbytes <= _SMALL_BYTES else machine.payload(nbytes))

    return act


def _text(form: str) -> Callable[[Machine], None]:
    """UTF-8 whose length in bytes comes first."""

    def act(machine: Machine) -> None:
        nbytes = machine.number(form)
        if nbytes <= _SMALL_BYTES:
            machine.stack.append(machine.read(nbytes).decode("utf-8", "surrogatepass"))
        else:
            machine.stack.append(machine.payload(nbytes, coding="text"))

    return act


def _old_text(form: str) -> Callable[[Machine], None]:
    """A str of Python 2: text, or bytes."""

    def act(machine: Machine) -> None:
        nbytes = machine.number(form)
        small = 0 <= nbytes <= _SMALL_BYTES
        machine.stack.append(machine.read(nbytes).decode("latin-1") if small else machine.payload(nbytes))

    return act


def _long(form: str) -> Callable[[Machine], None]:
    def act(machine: Machine) -> None:
        nbytes = machine.number(form)
        if not 0 <= nbytes <= _SMALL_BYTES:
            raise ValueError(f"a number of {nbytes} bytes")
        machine.stack.append(int.from_bytes(machine.read(nbytes), "little", signed=True))

    return act


def _tuple_of(count: int) -> Callable[[Machine], None]:
    def act(machine: Machine) -> None:
        if len(machine.stack) < count:
            raise IndexError("a tuple of nothing")
        start = len(machine.stack) - count
        machine.stack[start:] = [tuple(machine.stack[start:])]

    return act


def _marked(make: Callable[[list[Any]], Any]) -> Callable[[Machine], None]:
    def act(machine: Machine) -> None:
        items = machine.pop_mark()
        machine.stack.append(make(items))

    return act


def _put(form: str | None) -> Callable[[Machine], None]:
    def act(machine: Machine) -> None:
        machine.memo[len(machine.memo) if form is None else machine.number(form)] = machine.stack[-1]

    return act


def _append(machine: Machine) -> None:
    _extend(machine, [machine.stack.pop()])


def _extend(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, list):
        raise TypeError("something appended to what is no list")
    target.extend(items)


def _add(machine: Machine) -> None:
    items = machine.pop_mark()
    target = machine.stack[-1]
    if not isinstance(target, set):
        raise TypeError("something added to what is no set")
    target.update(_checked_keys(items))


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set_items(machine, [key, value])


def _set_items(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, dict):
        raise TypeError("a key for what is no dict")
    target.update(_dict_of(items))


def _dict_of(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return dict(zip(_checked_keys(items[::2]), items[1::2], strict=True))


def _checked_keys(keys: list[Any]) -> list[Any]:
    if not all(isinstance(key, _KEYS) for key in keys):
        raise TypeError("a key that is no text or number")
    return keys


def _global(machine: Machine) -> None:
    module, name = machine.line(), machine.line()
    machine.stack.append(machine.find(module, name))


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise TypeError("a name that is no text")
    machine.stack.append(machine.find(module, name))


def _reduce(machine: Machine) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.call(function, arguments))


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    if not isinstance(machine.stack[-1], Built):
        raise TypeError("a state for what has none")
    machine.stack[-1].build(state)


_ACTIONS: dict[bytes, Callable[[Machine], None]] = {
    pickle.FRAME: _skip_frame,
    pickle.MARK: Machine.mark,
    pickle.NONE: _push(lambda machine: None),
    pickle.NEWTRUE: _push(lambda machine: True),
    pickle.NEWFALSE: _push(lambda machine: False),
    pickle.BININT: _push(lambda machine: machine.number("<i")),
    pickle.BININT1: _push(lambda machine: machine.number("<B")),
    pickle.BININT2: _push(lambda machine: machine.number("<H")),
    pickle.BINFLOAT: _push(lambda machine: machine.number(">d")),
    pickle.LONG1: _long("<B"),
    pickle.LONG4: _long("<i"),
    pickle.SHORT_BINBYTES: _bytes("<B"),
    pickle.BINBYTES: _bytes("<I"),
    pickle.BINBYTES8: _bytes("<Q"),
    pickle.BYTEARRAY8: _bytes("<Q"),
    pickle.SHORT_BINSTRING: _old_text("<B"),
    pickle.BINSTRING: _old_text("<i"),
    pickle.SHORT_BINUNICODE: _text("<B"),
    pickle.BINUNICODE: _text("<I"),
    pickle.BINUNICODE8: _text("<Q"),
    pickle.EMPTY_TUPLE: _push(lambda machine: ()),
    pickle.TUPLE1: _tuple_of(1),
    pickle.TUPLE2: _tuple_of(2),
    pickle.TUPLE3: _tuple_of(3),
    pickle.TUPLE: _marked(tuple),
    pickle.EMPTY_LIST: _push(lambda machine: []),
    pickle.LIST: _marked(list),
    pickle.APPEND: _append,
    pickle.APPENDS: lambda machine: _extend(machine, machine.pop_mark()),
    pickle.EMPTY_DICT: _push(lambda machine: {}),
    pickle.DICT: _marked(_dict_of),
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: lambda machine: _set_items(machine, machine.pop_mark()),
    pickle.EMPTY_SET: _push(lambda machine: set()),
    pickle.FROZENSET: _marked(lambda items: frozenset(_checked_keys(items))),
    pickle.ADDITEMS: _add,
    pickle.MEMOIZE: _put(None),
    pickle.BINPUT: _put("<B"),
    pickle.LONG_BINPUT: _put("<I"),
    pickle.BINGET: _push(lambda machine: machine.memo[machine.number("<B")]),
    pickle.LONG_BINGET: _push(lambda machine: machine.memo[machine.number("<I")]),
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.REDUCE: _reduce,
    pickle.BUILD: _build,
}
