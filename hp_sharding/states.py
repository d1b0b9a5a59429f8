"""``state_dict()`` and its relatives: an optimizer's state as one rank holds it, given out and taken back.

A state is looked at as a whole before any of it is taken, so that one which does not fit changes nothing. It fits the
layout in which it was saved and no other; ``hp_sharding.save`` and ``load`` are for all others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase
from paddle.optimizer.lr import LambdaDecay, LRScheduler

from .buffer import FusedCommBuffer
from .errors import ConfigError
from .moments import Kind, drop_moments, keeps_master, kinds_of, make_moments, moments_of, set_master
from .pool import DTYPES
from .precision import dtype_name
from .schedule import Schedule
from .updates import optimizer_params

if TYPE_CHECKING:
    from .comm import Communicator
    from .layout import BucketLayout

LOG = logging.getLogger("hp_sharding")

LAYOUT_KEY = "hp_sharding_layout"
MASTERS_KEY = "master_weights"
SCHEDULER_KEY = "LR_Scheduler"


class RankState:
    """The state of a sharded optimizer on this rank.

    Args:
        inner: the user's optimizer, which updates the slices of the schedule's buckets.
        schedule: of the wrapped model.
        tensor: lane over the tensor-parallel ranks; None without any.
    """

    def __init__(
        self, inner: paddle.optimizer.Optimizer, schedule: Schedule, *, tensor: Communicator | None = None
    ) -> None:
        self._inner = inner
        self._schedule = schedule
        self._tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        """See ``ShardedOptimizer.state_dict``."""
        state = {**self._inner.state_dict(), LAYOUT_KEY: self._layout_id()}
        is_mixed = any(_has_masters(buffer) for buffer in self._buffers)
        return {**state, MASTERS_KEY: self.masters()} if is_mixed else state

    def masters(self) -> dict[str, paddle.Tensor]:
        """Parameter name -> the float32 part that this rank updates, where the parameter has fewer bits."""
        return _slices(buffer for buffer in self._buffers if _has_masters(buffer))

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See ``ShardedOptimizer.set_state_dict``."""
        state = _as_dict(state_dict, self._where)
        self._check_layout(state.pop(LAYOUT_KEY, None))
        masters = _as_dict(state.pop(MASTERS_KEY, {}), self._where, key=MASTERS_KEY)
        rates = _Rates(self._inner, state, self._where)
        moments = _Moments(self._inner, self._held(), state, self._where)
        self._check_masters(masters)
        self._thaw(masters)
        moments.take(self._held())  # slices of what has thawed are new ones
        self._take_masters(masters)
        rates.take()

    @property
    def _buffers(self) -> list[FusedCommBuffer]:
        return self._schedule.buffers

    @property
    def _where(self) -> str:
        gather: Communicator = self._buffers[0].place.gather
        return f"rank {gather.ranks[gather.rank]}: "

    def _layout_id(self) -> str:
        gather = self._buffers[0].place.gather
        sizes = ",".join(map(_size_text, (buffer.layout for buffer in self._buffers)))
        part = "" if self._tensor is None else f" (tensor-parallel part {self._tensor.rank} of {self._tensor.nranks})"
        return f"rank {gather.rank} of {gather.nranks}{part}, buckets of {sizes} elements"

    def _check_layout(self, found: Any) -> None:
        expected = self._layout_id()
        if found is None:
            raise ConfigError(
                f"{self._where}this optimizer state is not one of a sharded optimizer: it names no layout. Expected "
                f"{expected}, found None. hp_sharding.load_full reads files of plain Paddle's"
            )
        if found != expected:
            raise ConfigError(
                f"{self._where}this optimizer state is of another layout. Expected {expected}, found {found}. Load it "
                "with the same number of ranks, stage, units, comm_buffer_size_MB (where it was 'auto', the number "
                "chosen) and dtypes as it was saved, each rank its own; hp_sharding.save and hp_sharding.load change "
                "from one layout to another"
            )

    def _check_masters(self, given: Mapping[str, Any]) -> None:
        # One that was frozen when the model was wrapped has masters since it thawed, maybe after the state was saved.
        expected = _slices(
            buffer
            for buffer in self._buffers
            if _is_in(buffer, given) or (_has_masters(buffer) and not buffer.layout.frozen)
        )
        _check_names(given, expected, self._where)
        for name, part in expected.items():
            where = f"{self._where}'{MASTERS_KEY}' of parameter '{name}'"
            _check_value(given.get(name), list(part.shape), "float32", where)

    def _held(self) -> list[EagerParamBase]:
        """What this rank updates, in the order of the optimizer's parameters."""
        slices = _slices(self._buffers)
        return [slices[param.name] for param in optimizer_params(self._inner) if param.name in slices]

    @paddle.no_grad()
    def _thaw(self, given: Mapping[str, Any]) -> None:
        """What has masters in the state has them here from now on; moments are filed accordingly."""
        self._schedule.gathers.finish_under_way()  # a gather reads what is written from here on
        for buffer in self._buffers:
            if _is_in(buffer, given):
                buffer.thaw()

    @paddle.no_grad()
    def _take_masters(self, given: Mapping[str, Any]) -> None:
        for name, part in self.masters().items():
            if name in given:
                _write(part, given[name])
        for buffer in self._buffers:
            buffer.follow_shard()


def set_plain_state(inner: paddle.optimizer.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Gives an optimizer over whole parameters a state that it, or one like it, had; see ``PlainOptimizer``."""
    state = _as_dict(state_dict, "")
    if LAYOUT_KEY in state:
        raise ConfigError(
            f"this optimizer state is that of one rank of a sharded optimizer ({state[LAYOUT_KEY]}), but this process "
            "trains alone. Load it on as many ranks as it was saved on; hp_sharding.save and hp_sharding.load change "
            "from one number of ranks to another"
        )
    masters = _as_dict(state.pop(MASTERS_KEY, {}), "", key=MASTERS_KEY)
    rates = _Rates(inner, state, "")
    params = optimizer_params(inner)
    moments = _Moments(inner, params, state, "")
    expected = {param.name: param for param in params if keeps_master(inner, param)}
    _check_names(masters, expected, "")
    for name, param in expected.items():
        if name in masters or name in moments.found:
            _check_value(masters.get(name), param.shape, "float32", f"'{MASTERS_KEY}' of parameter '{name}'")
    moments.take(params)
    with paddle.no_grad():
        for name, value in masters.items():
            set_master(inner, expected[name], _as_tensor(value, "float32"))
    rates.take()


class _Rates:
    """The learning rate's schedule in a state, checked and then taken, as by Paddle."""

    def __init__(self, inner: paddle.optimizer.Optimizer, state: dict[str, Any], where: str) -> None:
        self._scheduler = inner._learning_rate if isinstance(inner._learning_rate, LRScheduler) else None
        self._given = state.pop(SCHEDULER_KEY, None)
        if self._given is not None and not isinstance(self._given, Mapping):
            raise ConfigError(f"{where}'{SCHEDULER_KEY}': expected a dict, found {type(self._given).__name__}")
        if self._given is None and self._scheduler is not None and not isinstance(self._scheduler, LambdaDecay):
            raise ConfigError(
                f"{where}the optimizer's learning rate is a {type(self._scheduler).__name__}, but this state has no "
                f"'{SCHEDULER_KEY}'. Load one that was saved with a scheduler, or make the optimizer with a number"
            )

    def take(self) -> None:
        if self._scheduler is not None and self._given:
            self._scheduler.set_state_dict(self._given)
        elif self._given:
            LOG.warning(
                "the optimizer state has a learning rate scheduler's, which is not used: the learning rate of this "
                "optimizer is a number"
            )


class _Place(NamedTuple):
    """Where a tensor of a state belongs."""

    param: EagerParamBase
    moment: str
    kind: Kind

    @property
    def shape(self) -> list[int]:
        return list(self.kind.shape_of(tuple(self.param.shape)))


class _Moments:
    """The moments in a state, sorted and checked, and then taken.

    Attributes:
        found: parameter name -> moment -> value; a parameter that had not been updated yet is not there.

    Raises:
        ConfigError: a key belongs to no parameter, a parameter lacks a moment, or one is of another size or dtype.
    """

    def __init__(
        self,
        inner: paddle.optimizer.Optimizer,
        params: Sequence[EagerParamBase],
        state: Mapping[str, Any],
        where: str,
    ) -> None:
        self._inner = inner
        self._where = where
        places = self._places(params)
        self._check_keys(state, places)
        self.found: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            place = places[_stem(key)]
            _check_value(value, place.shape, place.kind.dtype, f"{where}'{key}'")
            of_param = self.found.setdefault(place.param.name, {})
            if place.moment in of_param:
                raise ConfigError(f"{where}'{key}': '{place.moment}' of '{place.param.name}' is there more than once")
            of_param[place.moment] = value
        self._check_complete(places.values())

    @paddle.no_grad()
    def take(self, params: Sequence[EagerParamBase]) -> None:
        """Makes, fills or forgets the moments of each of ``params``, which may have become others of the same names."""
        forgotten = []
        for param in params:
            if param.name in self.found:
                for moment in make_moments(self._inner, param):
                    _write(moment.tensor, self.found[param.name][moment.name])
            else:
                forgotten += [param.name] if moments_of(self._inner, param) else []
                drop_moments(self._inner, param)
        self._inner._accumulators_holder = {}
        if forgotten and self.found:
            LOG.warning(
                "%sthe optimizer state has nothing of %d of %d parameters, such as '%s': they had not been updated "
                "when it was saved, and begin anew",
                self._where,
                len(forgotten),
                len(params),
                forgotten[0],
            )

    def _places(self, params: Sequence[EagerParamBase]) -> dict[str, _Place]:
        prefix = "" if self._inner._name is None else f"{self._inner._name}_"
        return {
            f"{param.name}_{prefix}{moment}": _Place(param, moment, kind)
            for param in params
            for moment, kind in kinds_of(self._inner, param).items()
        }

    def _check_keys(self, state: Mapping[str, Any], places: Mapping[str, _Place]) -> None:
        strange = [key for key in state if _stem(key) not in places]
        if not strange:
            return
        kind = type(self._inner).__name__
        mine = next(iter(places), None)
        mine_text = f"such as '{mine}_0'" if mine else f"none, since this {kind} keeps nothing of a parameter"
        raise ConfigError(
            f"{self._where}{len(strange)} of {len(state)} tensors of this optimizer state belong to no parameter of "
            f"this {kind}, such as '{strange[0]}'; expected {mine_text}. The names are those of parameters, which "
            "Paddle numbers in the order in which a process makes them: make the model as it was made when the state "
            "was saved, and first in its process, with the same kind of optimizer. hp_sharding.load goes by structured "
            "names, which do not depend on that"
        )

    def _check_complete(self, places: Iterable[_Place]) -> None:
        for param, moment, _ in places:
            if param.name in self.found and moment not in self.found[param.name]:
                raise ConfigError(
                    f"{self._where}this optimizer state lacks '{moment}' of parameter '{param.name}', and has "
                    f"{', '.join(self.found[param.name])}. Expected a state of the same kind of optimizer, with the "
                    "same options"
                )


# -- values ------------------------------------------------------------------------------------------------------------


def _as_dict(state: Any, where: str, *, key: str = "") -> dict[str, Any]:
    if not isinstance(state, Mapping):
        name = f"'{key}'" if key else "the optimizer state"
        raise ConfigError(f"{where}{name}: expected a dict, as state_dict() gives it, found {type(state).__name__}")
    return dict(state)


_NUMBER = re.compile(r"_\d+$")
_OF_MASTER = re.compile(r"_fp32_master_\d+(?=_)")


def _stem(key: str) -> str:
    """A key without what may differ between processes, and between a parameter and its master."""
    return _OF_MASTER.sub("", _NUMBER.sub("", key))


def _check_names(given: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    strange = [name for name in given if name not in expected]
    if strange:
        raise ConfigError(
            f"{where}'{MASTERS_KEY}' has {len(strange)} of {len(given)} names that no parameter with a float32 "
            f"master has here, such as '{strange[0]}'; expected some of {', '.join(list(expected)[:3]) or 'none'}. "
            "Load a state that was saved in the same precision, in a process that made the model in the same order"
        )


def _check_value(value: Any, shape: list[int], dtype: str, where: str) -> None:
    """Raises ConfigError unless it is a tensor or array of that shape, and of a dtype of the same kind."""
    if not isinstance(value, (paddle.Tensor, np.ndarray)):
        found = "none" if value is None else f"a {type(value).__name__}"
    elif list(value.shape) != list(shape):
        found = f"{list(value.shape)}"
    elif _is_floating(value, dtype) != (dtype in DTYPES):
        found = f"{list(value.shape)} of {dtype_name(value)}"
    else:
        return
    raise ConfigError(
        f"{where}: expected {list(shape)} elements of {dtype}, found {found}. Load a state that was saved in the same "
        "layout and precision, with the same options"
    )


def _is_floating(value: Any, dtype: str) -> bool:
    is_bits = isinstance(value, np.ndarray) and value.dtype == np.uint16 and dtype == "bfloat16"
    return is_bits or dtype_name(value) in DTYPES


def _as_tensor(value: Any, dtype: str) -> paddle.Tensor:
    if isinstance(value, np.ndarray):
        bits = value.dtype == np.uint16 and dtype == "bfloat16"
        value = paddle.to_tensor(value, dtype="bfloat16") if bits else paddle.to_tensor(value)
    return value.astype(dtype)


def _write(tensor: paddle.Tensor, value: Any) -> None:
    value = _as_tensor(value, dtype_name(tensor))
    tensor.copy_(value, value.place != tensor.place)


# -- buckets -----------------------------------------------------------------------------------------------------------


def _slices(buffers: Iterable[FusedCommBuffer]) -> dict[str, EagerParamBase]:
    """Parameter name -> the part that this rank holds."""
    return {buffer.params[piece.param].name: piece.tensor for buffer in buffers for piece in buffer.slices}


def _has_masters(buffer: FusedCommBuffer) -> bool:
    return not buffer.layout.dtypes.shard_is_slice


def _is_in(buffer: FusedCommBuffer, given: Mapping[str, Any]) -> bool:
    return any(param.name in given for param in buffer.params)


def _size_text(layout: BucketLayout) -> str:
    param, master = layout.dtypes.param, layout.dtypes.sum  # which a frozen one gets when it thaws
    return str(layout.numel) if param == master == layout.dtypes.gather else f"{layout.numel} ({param} of {master})"
