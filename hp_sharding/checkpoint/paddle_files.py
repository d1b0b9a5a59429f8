"""``.pdparams`` and ``.pdopt``: plain Paddle's files, from and to logical names.

``.pdparams`` has structured names, and beside them ``parameter.name``, of which the keys of ``.pdopt`` are made. So
both files of one save belong together, whatever names the loading process would give.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy.typing as npt

from ..errors import CheckpointError
from .full_state import BLOCK_NUMEL, Found, FullMoment, FullParam, FullState, discard_both, put_in_place
from .lazy import LazyTensor
from .paddle_names import accumulator_variable, master_variable, owner_of, without_optimizer_name
from .pickled import PickleWriter, Streamed
from .source import MODEL, OPTIMIZER, STORAGE, TensorInfo
from .unpickled import PickledFile

WEIGHTS = ".pdparams"
OPTIMIZER_STATE = ".pdopt"
_MASTERS = "master_weights"
_SCHEDULER = "LR_Scheduler"
_SHOWN = 3

Array = npt.NDArray[Any]


def found_in_paddle(weights: PickledFile, optimizer: PickledFile | None) -> Found:
    """What the two files hold.

    Raises:
        CheckpointError: there is something in them that is not of a model's or an optimizer's ``state_dict()``, or they
            do not belong together.
    """
    tensors = _weights_of(weights)
    aliases = _aliases_of(tensors)
    found = Found(
        {f"{MODEL}{key}": tensor for key, tensor in tensors.items() if key not in aliases},
        {f"{MODEL}{alias}": f"{MODEL}{first}" for alias, first in aliases.items()},
        {},
    )
    if optimizer is not None:
        _add_optimizer(found, weights, optimizer)
    return found


def _weights_of(file: PickledFile) -> dict[str, LazyTensor]:
    for key, value in file.content.items():
        if not isinstance(key, str) or not isinstance(value, LazyTensor):
            raise CheckpointError(
                f"{file.path} holds a {type(value).__name__} under {key!r}, where a tensor was expected. Save only "
                "model.state_dict() in it",
                file=file.path,
                parameter=str(key),
            )
    return dict(file.content)


def _aliases_of(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Tied parameters: Paddle saves them once for each key, with one name."""
    firsts: dict[str, str] = {}
    aliases = {}
    for key, tensor in tensors.items():
        first = firsts.setdefault(tensor.name, key) if tensor.name else key
        # Dicts put together of several models can have one name twice, since processes count alike.
        if first != key and _is_same(tensors[first], tensor):
            aliases[key] = first
    return aliases


def _is_same(one: LazyTensor, other: LazyTensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    numel = math.prod(one.shape)
    steps = range(0, 0 if one.parts == other.parts else numel, BLOCK_NUMEL)
    spans = [(start, min(start + BLOCK_NUMEL, numel)) for start in steps]
    return all(one.read(*span).tobytes() == other.read(*span).tobytes() for span in spans)


def _add_optimizer(found: Found, weights: PickledFile, file: PickledFile) -> None:
    content = dict(file.content)
    found.state["lr_scheduler"] = _plain(content.pop(_SCHEDULER, None))
    masters = content.pop(_MASTERS, {})
    owners = {tensor.name: name for name, tensor in found.tensors.items() if tensor.name}
    _check_owned(weights, file, [name for name in masters if name not in owners])
    names = owners | {tensor.name: owners[name] for name, tensor in masters.items() if tensor.name}
    _add_moments(found, weights, file, content, names)
    for name, master in masters.items():
        _use_master(found, file, owners[name], master)


def _use_master(found: Found, file: PickledFile, name: str, master: LazyTensor) -> None:
    if master.shape != found.tensors[name].shape:
        raise CheckpointError(
            f"{file.path}: the master weight of {name.removeprefix(MODEL)} has shape {list(master.shape)}, but the "
            f"parameter {list(found.tensors[name].shape)}: the two files are not of one save",
            file=file.path,
            parameter=name.removeprefix(MODEL),
        )
    found.tensors[name] = master


def _add_moments(
    found: Found, weights: PickledFile, file: PickledFile, content: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    for key, value in content.items():
        if not isinstance(value, LazyTensor):
            raise CheckpointError(
                f"{file.path} holds a {type(value).__name__} under {key!r}, which optimizer.state_dict() does not have",
                file=file.path,
                parameter=str(key),
            )
    owned = {key: owner_of(key, names) for key in content}
    _check_owned(weights, file, [key for key, owner in owned.items() if owner is None])
    plain = without_optimizer_name(owner[1] for owner in owned.values() if owner is not None)
    for key, owner in owned.items():
        assert owner is not None
        name = f"{OPTIMIZER}{owner[0].removeprefix(MODEL)}/{plain[owner[1]]}"
        if name in found.tensors:
            raise CheckpointError(
                f"{file.path}: {key} is a second {owner[1]} of one parameter; save optimizer.state_dict() of one "
                "optimizer in it",
                file=file.path,
                parameter=owner[0].removeprefix(MODEL),
            )
        found.tensors[name] = content[key]


def _check_owned(weights: PickledFile, file: PickledFile, strangers: list[str]) -> None:
    if strangers:
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        raise CheckpointError(
            f"{file.path}: {', '.join(map(str, strangers[:_SHOWN]))}{more} belong to no parameter in {weights.path}. "
            "The names in both come from the process that saved them: take both from the same save",
            file=file.path,
            parameter=str(strangers[0]),
        )


def _plain(value: Any) -> Any:
    """With arrays in place of tensors."""
    if isinstance(value, LazyTensor):
        return value.array()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


class PaddleTarget:
    """Writes both files; see ``full_state.Target``."""

    def __init__(self, prefix: str, state: FullState) -> None:
        self._state = state
        self._params = {param.structured: param for param in state.params}
        self._weights = PickleWriter(prefix + WEIGHTS, in_table=True)
        self._optimizer: PickleWriter | None = None
        self._is_in_masters = state.has_masters
        if state.has_optimizer:
            try:
                # Paddle makes a table of names only where no tensors lie deeper.
                self._optimizer = PickleWriter(prefix + OPTIMIZER_STATE, in_table=not state.has_masters)
                if state.has_masters:
                    self._optimizer.begin(_MASTERS)
            except BaseException:
                self.discard()
                raise

    def weight(self, param: FullParam, blocks: Iterable[Array]) -> None:
        tensor = _streamed(param.param_name, TensorInfo(param.info.shape, param.file_dtype), blocks)
        aliases = self._state.aliases_of(param.structured)
        self._weights.put(param.structured, tensor, is_tied=bool(aliases))
        for alias in aliases:
            self._weights.put_again(alias, param.structured)

    def master(self, param: FullParam, blocks: Iterable[Array]) -> None:
        assert self._optimizer is not None
        name = master_variable(param.param_name)
        self._optimizer.put(param.param_name, _streamed(name, param.info, blocks))

    def moment(self, moment: FullMoment, blocks: Iterable[Array]) -> None:
        assert self._optimizer is not None
        self._end_masters(self._optimizer)
        param = self._params[moment.structured]
        key = accumulator_variable(
            param.param_name,
            moment.moment,
            has_master=param.has_master,
            optimizer_name=self._state.optimizer_name,
        )
        self._optimizer.put(key, _streamed(key, moment.info, blocks))

    def commit(self) -> None:
        if self._optimizer is not None:
            self._end_masters(self._optimizer)
            scheduler = self._state.state.get("lr_scheduler")
            if scheduler is not None:
                self._optimizer.put(_SCHEDULER, scheduler)
        put_in_place(self._weights, self._optimizer)

    def discard(self) -> None:
        discard_both(self._weights, self._optimizer)

    def _end_masters(self, optimizer: PickleWriter) -> None:
        if self._is_in_masters:
            optimizer.end()
            self._is_in_masters = False


def _streamed(name: str, info: TensorInfo, blocks: Iterable[Array]) -> Streamed:
    return Streamed(name, info.shape, STORAGE[info.dtype], blocks)
