"""What of a source goes where: found out, and everything that does not fit named, before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paddle.optimizer.lr import LRScheduler

from ..errors import CheckpointError
from ..moments import kinds_of
from .blocks import fits
from .held import Held, HeldTensor, Updated
from .index import parameter_of
from .schedulers import needed_keys, scheduler_state
from .source import MODEL, OPTIMIZER, SPLIT_MARK, STATE, TensorInfo, TensorSource

_SCHEDULER = STATE + "lr_scheduler"
_MARK = re.compile(rf"{SPLIT_MARK}(\d+)of(\d+)(?=/|$)")
_LISTED = 20
"""Names that an error shows."""


class TensorMatch(NamedTuple):
    """A parameter or buffer, and the name under which the source has its value."""

    held: HeldTensor
    name: str


class MomentsMatch(NamedTuple):
    """A parameter of the optimizer, and what the source has of its moments: moment -> name in the source.

    ``is_complete``: that is all of them.
    """

    updated: Updated
    names: dict[str, str]
    is_complete: bool


class Matched(NamedTuple):
    """All that can be loaded, and what is left over on either side, by logical name, sorted.

    Attributes:
        tensors: parameters and buffers.
        moments: one for each parameter of the optimizer that the source says something of; those without names have
            never been updated.
        unmade: buffers that the source has, and the model only after its first forward.
        missing: what the model and its optimizer have, and the source does not.
        unexpected: what the source has, and they do not.
    """

    tensors: list[TensorMatch]
    moments: list[MomentsMatch]
    unmade: list[str]
    missing: list[str]
    unexpected: list[str]


def match(held: Held, source: TensorSource, scaler: Any, *, strict: bool) -> Matched:
    """Compares both by structured names.

    Raises:
        CheckpointError: shapes, or kinds of dtypes, of the same name differ; or, if ``strict``, names are missing or
            unexpected. Lists them.
    """
    _check_tensor_parallel(held, source)
    found = _Matching(held, source)
    matched = found.run(scaler)
    if found.wrong:
        raise _error(source, f"does not fit this model: {_listed(found.wrong)}", found.wrong[0].partition(":")[0])
    if strict and (matched.missing or matched.unexpected):
        parts = []
        if matched.missing:
            parts.append(f"it lacks {_listed(matched.missing)}")
        if matched.unexpected:
            parts.append(f"this model and its optimizer do not have {_listed(matched.unexpected)}")
        advice = "Load with strict=False to take what is there, and get both lists"
        first = (matched.missing or matched.unexpected)[0]
        raise _error(source, f"does not match: {'; '.join(parts)}. {advice}", first)
    return matched


class _Matching:
    """Walks over both sides once.

    Attributes:
        wrong: what has the right name and does not fit, in words, each beginning with the name and a colon.
    """

    def __init__(self, held: Held, source: TensorSource) -> None:
        self._held = held
        self._source = source
        self._missing: list[str] = []
        self._taken: set[str] = set()
        self.wrong: list[str] = []

    def run(self, scaler: Any) -> Matched:
        tensors = list(self._match_tensors())
        moments = list(self._match_moments())
        unmade = [name for name in self._held.unmade if name in self._source.tensors]
        self._taken.update(unmade)
        names = [name for name in self._source.tensors if name.startswith(self._prefixes()) and self._concerns(name)]
        unexpected = [name for name in names if name not in self._taken and not self._is_alias(name)]
        if self._held.inner is not None:
            here, there = _state_here(self._held, scaler), _state_there(self._source)
            self._missing += _without_details(here.needed - there)
            unexpected += _without_details(there - here.known)
        return Matched(tensors, moments, unmade, sorted(self._missing), sorted(unexpected))

    def _is_alias(self, name: str) -> bool:
        """Whoever unties a model finds the same value under both names; whoever ties one, two values for one."""
        return name in self._held.aliases or MODEL + parameter_of(name) in self._held.aliases

    def _concerns(self, name: str) -> bool:
        """Not the part of a split parameter that another rank has."""
        mark = _MARK.search(name) if SPLIT_MARK in name else None
        return mark is None or int(mark[1]) == self._held.ranks.tensor[0]

    def _prefixes(self) -> tuple[str, ...]:
        return (MODEL, OPTIMIZER) if self._held.inner is not None else (MODEL,)

    def _match_tensors(self) -> Iterator[TensorMatch]:
        other_names: dict[str, list[str]] = {}
        for alias, name in self._held.aliases.items():
            other_names.setdefault(name, []).append(alias)
        for held in self._held.tensors():
            stored = self._find([held.name, *other_names.get(held.name, ())])
            if stored is None:
                self._missing.append(held.name)
            elif self._take(stored, held.info):
                yield TensorMatch(held, stored)

    def _match_moments(self) -> Iterator[MomentsMatch]:
        if self._held.inner is None:
            return
        if not self._has_optimizer():
            self._missing.append(f"{OPTIMIZER}*")
            return
        saved: dict[str, list[str]] = {}
        for name in self._source.tensors:
            if name.startswith(OPTIMIZER):
                param, _, moment = name.removeprefix(OPTIMIZER).rpartition("/")
                saved.setdefault(param, []).append(moment)
        forgotten = self._forgotten(saved)
        for updated in self._held.updated():
            names = {}
            param = self._stored_name(updated.name, saved)
            theirs = saved.get(param, [])
            kinds = kinds_of(self._held.inner, updated.param) if theirs or updated.name in forgotten else {}
            for moment, kind in kinds.items():
                name = f"{OPTIMIZER}{param}/{moment}"
                if moment not in theirs:
                    self._missing.append(f"{OPTIMIZER}{updated.name}/{moment}")
                elif self._take(name, TensorInfo(kind.shape_of(updated.shape), kind.dtype)):
                    names[moment] = name
            yield MomentsMatch(updated, names, len(names) == len(kinds))

    def _forgotten(self, saved: Mapping[str, Sequence[str]]) -> set[str]:
        """Parameters that another kind of optimizer has updated and, as SGD does, kept nothing of."""
        state = self._source.state
        if state.get("optimizer") in (None, type(self._held.inner).__name__) or saved:
            return set()
        everything = [updated.name for updated in self._held.updated()] if state.get("steps") else []
        return set(state.get("used") or everything)

    def _has_optimizer(self) -> bool:
        """Also one without moments, such as SGD, or one that has not made a step."""
        state = self._source.state
        if "optimizer" in state:
            return state["optimizer"] is not None
        # Files of Paddle's do not name it, but have a place for its scheduler.
        return "lr_scheduler" in state or any(name.startswith(OPTIMIZER) for name in self._source.tensors)

    def _stored_name(self, param: str, saved: dict[str, list[str]]) -> str:
        """Under which of its names the optimizer state of a tied parameter is stored."""
        names = [param]
        names += [alias.removeprefix(MODEL) for alias, name in self._held.aliases.items() if name == MODEL + param]
        names += [self._source.aliases.get(MODEL + name, "").removeprefix(MODEL) for name in list(names)]
        return next((name for name in names if name in saved), param)

    def _find(self, names: Sequence[str]) -> str | None:
        for name in names:
            if name in self._source.tensors:
                return name
            if name in self._source.aliases:
                return self._source.aliases[name]
        return None

    def _take(self, name: str, wanted: TensorInfo) -> bool:
        self._taken.add(name)
        stored = self._source.tensors[name]
        if stored.shape != wanted.shape and not (stored.numel == wanted.numel == 1):
            self.wrong.append(f"{name}: expected shape {list(wanted.shape)}, found {list(stored.shape)}")
            return False
        if not fits(stored.dtype, wanted.dtype):
            self.wrong.append(f"{name}: expected {wanted.dtype}, found {stored.dtype}")
            return False
        return True


class _StateNames(NamedTuple):
    """What beside tensors the optimizer needs, and what it knows what to do with."""

    needed: set[str]
    known: set[str]


def _state_here(held: Held, scaler: Any) -> _StateNames:
    """By names such as ``state/lr_scheduler/last_epoch``."""
    rate = held.inner._learning_rate
    needed = {STATE + "scaler"} if scaler is not None and scaler.state_dict() else set()
    if not isinstance(rate, LRScheduler):
        return _StateNames(needed, needed)
    needed |= {_SCHEDULER, *(f"{_SCHEDULER}/{key}" for key in needed_keys(rate))}
    known = {f"{_SCHEDULER}/{key}" for key in scheduler_state(rate)}
    return _StateNames(needed, needed | known | {f"{_SCHEDULER} of {type(rate).__name__}"})


def _without_details(names: set[str]) -> set[str]:
    """Where there is no scheduler at all, what it would consist of does not matter."""
    return {name for name in names if not name.startswith(_SCHEDULER) or name == _SCHEDULER or _SCHEDULER not in names}


def _state_there(source: TensorSource) -> set[str]:
    """The same, of what the source has, and of which class its scheduler is where it says so."""
    scheduler, kind = source.state.get("lr_scheduler"), source.state.get("lr_scheduler_class")
    names = {STATE + "scaler"} if source.state.get("scaler") else set()
    if scheduler is not None:
        names |= {_SCHEDULER, *(f"{_SCHEDULER}/{key}" for key in scheduler)}
    return names | ({f"{_SCHEDULER} of {kind}"} if kind is not None else set())


def _check_tensor_parallel(held: Held, source: TensorSource) -> None:
    found = [_MARK.search(name) for name in source.tensors if SPLIT_MARK in name]
    saved = max((int(match[2]) for match in found if match), default=1)
    here = held.ranks.tensor[1]
    if saved != here:
        raise _error(
            source,
            f"is of parameters that are split over {saved} tensor-parallel ranks, and here they are over {here}. Load "
            "it with the same mp_degree; shard ranks, replicas and stage may change",
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _error(source: TensorSource, what: str, name: str = "") -> CheckpointError:
    return CheckpointError(f"checkpoint '{source.where}' {what}", file=source.where, parameter=parameter_of(name))
