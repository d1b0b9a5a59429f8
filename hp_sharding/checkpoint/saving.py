"""``save``: every rank writes its share of the state, the first one an index last. Now, or behind the training.

No collective carries state. What the ranks tell each other is what the save is called, and whether all is well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import paddle
from paddle import nn
from paddle.optimizer.lr import LRScheduler

from ..errors import CheckpointError, ConfigError
from . import folder, values
from .blocks import copied, host_blocks
from .held import Held
from .ranks import Ranks
from .rng import rng_state
from .schedulers import scheduler_state
from .shares import Share, own_shares
from .tensor_file import Piece, array_piece

LOG = logging.getLogger("hp_sharding")
_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_LAST_SHARES_S = 10.0
"""How long shares may still come once a rank is gone."""
_PENDING: weakref.WeakKeyDictionary[nn.Layer, PendingSave] = weakref.WeakKeyDictionary()
"""Of each model, the save that has not been waited for."""


def save(
    path: str | PathLike[str],
    model: nn.Layer,
    optimizer: Any = None,
    *,
    scaler: Any = None,
    extra: Any = None,
    rank_extra: Any = None,
    asynchronous: bool = False,
) -> PendingSave:
    """Saves a checkpoint: parameters, buffers, optimizer state, learning rate, step counter, random states.

    ``path`` becomes a folder that ``load`` reads into any number of ranks, stage, bucket size and precision. Every rank
    writes only its share, to a file system that all of them see. A checkpoint that is there already is replaced; until
    the new one is complete, the old one stays loadable, whatever happens. Collective: every rank calls it, after
    ``step()`` and ``clear_grad()`` and before the next forward. Gradients are not saved, but which parameters have had
    one. A model that is not sharded is saved by one process alone.

    Args:
        path: the folder; it and those above it are made.
        model: wrapped or not.
        optimizer: what ``shard`` or ``fleet.distributed_optimizer`` returned, or Paddle's own in one process; None
            saves the model alone, which only one that is not sharded can do.
        scaler: a GradScaler whose state is to be saved, too.
        extra: values to keep beside, the same on every rank: None, bool, numbers, str, bytes, lists, tuples, sets,
            dicts, NumPy arrays, Paddle tensors.
        rank_extra: such values of this rank alone, as where its data loader stands. ``load`` gives them back to as
            many ranks as there are now.
        asynchronous: return once the state has been copied, which needs as much host memory, and write behind the
            training. The next save waits for this one.

    Returns:
        What to wait for; already complete unless ``asynchronous``.

    Raises:
        CheckpointError: a file cannot be written, ``extra`` holds what a checkpoint cannot, or differs between ranks;
            on every rank. Nothing new is left behind.
        ConfigError: model and optimizer do not belong together.
        CommError: a rank is gone or late.
    """
    held = Held(model, optimizer)
    check_scaler(scaler)
    _check_caller(held, path)
    try:
        finish_pending(model)
    except CheckpointError as error:
        raise CheckpointError(f"before this save, the asynchronous one failed: {error}", file=error.file) from error
    ranks = held.ranks
    with ranks.together():
        held.keep_writes()
        shared = values.encode(state_of(held, scaler, extra), where="")
        own = values.encode({"rng": rng_state(), "rank_extra": rank_extra}, where="", prefix=f"rank/{ranks.rank}/")
        of_extra = values.Encoded(shared.json["extra"], shared.arrays)
        digest = values.digest(of_extra) if ranks.n_ranks > 1 else 0
    save_id = _agree_on_id(ranks, Path(path).name, digest)
    with ranks.together():
        pieces = [_tensor_piece(share, copy=asynchronous) for share in own_shares(held)]
        pieces += _state_pieces(own, f"rank/{ranks.rank}/state")
        if ranks.is_first:
            pieces += [array_piece(name, array) for name, array in shared.arrays.items()]
        place = folder.Save(Path(path), save_id, ranks.rank, ranks.n_ranks)
    pending = PendingSave(place, ranks, pieces=pieces, described=Described(shared.json, held.all_aliases()))
    if asynchronous:
        pending.start()
        _PENDING[model] = pending
    else:
        pending.finish_now()
    return pending


def check_scaler(scaler: Any) -> None:
    """Raises ConfigError for what is no scaler."""
    if scaler is not None and not (hasattr(scaler, "state_dict") and hasattr(scaler, "load_state_dict")):
        raise ConfigError(f"scaler: expected a paddle.amp.GradScaler, got {type(scaler).__name__}")


def _check_caller(held: Held, path: str | PathLike[str]) -> None:
    if not fspath(path):
        raise ConfigError("path: expected the path of a folder, got an empty one")
    rank = paddle.distributed.get_rank()
    if held.schedule is None and rank != 0:
        raise ConfigError(
            f"rank {rank}: this {type(held.model).__name__} is not sharded, so that a save is one process's own, and "
            "those of several would write over each other. Call it on rank 0 alone"
        )


def finish_pending(model: nn.Layer) -> None:
    """Waits for the asynchronous save of ``model`` under way, if there is one. Collective.

    Raises:
        CheckpointError: it has failed.
    """
    pending = _PENDING.pop(model, None)
    if pending is not None and pending.is_unheard:
        pending.wait()


class Described(NamedTuple):
    """What the index says besides: ``state`` as JSON, and other names of tied parameters."""

    state: Any
    aliases: dict[str, str]


class PendingSave:
    """A checkpoint on its way to the disk."""

    def __init__(self, place: folder.Save, ranks: Ranks, *, pieces: Sequence[Piece], described: Described) -> None:
        self._place = place
        self._ranks = ranks
        self._pieces = list(pieces)
        self._described: Described | None = described
        self._cancelled = threading.Event()
        self._futures: list[Future[None]] = []
        self._unwaited = self._futures
        self._failure: Exception | None = None

    def done(self) -> bool:
        """Whether this rank has nothing left to do for it; on the first one, whether it is complete. Never blocks."""
        return all(future.done() for future in self._futures)

    @property
    def is_unheard(self) -> bool:
        """Whether nobody has waited for it yet; the same on all ranks."""
        return bool(self._unwaited)

    def wait(self) -> None:
        """Returns once the checkpoint is complete. Collective: every rank calls it; again, it says the same at once.

        ``done()`` may differ between ranks, so what depends on it must not decide who waits.

        Raises:
            CheckpointError: some rank could not write its share, or the first one not the index; on every rank. What
                was at that place before is as it was.
        """
        if self._failure is not None:
            raise self._failure
        futures, self._unwaited = self._unwaited, []
        for future in futures:
            with self._cleaning_up(), self._ranks.together(takes_long=True):
                future.result()

    def start(self) -> None:
        """Writes in the background; the process does not end before that is done. Collective."""
        with self._cleaning_up(), self._ranks.together():
            executor = ThreadPoolExecutor(1, thread_name_prefix="hp_sharding-checkpoint")
            self._futures = [executor.submit(self._write), executor.submit(self._commit_when_all_is_there)]
            executor.shutdown(wait=False)
            for future in self._futures:
                future.add_done_callback(self._log_failure)
        self._unwaited = self._futures

    def finish_now(self) -> None:
        """Writes before it returns. Collective; raises as ``wait`` does."""
        with self._cleaning_up(), self._ranks.together(takes_long=True):
            self._write()
        with self._cleaning_up(), self._ranks.together(takes_long=True):
            self._commit()

    @contextlib.contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        """Where it fails, on whatever rank, what this one has written goes."""
        try:
            yield
        except Exception as error:
            self._failure = error
            self._cancelled.set()
            wait_for(self._futures)  # nothing may be written behind its back
            self._place.discard()
            raise

    def _write(self) -> None:
        try:
            if self._ranks.is_first:
                self._place.check_place()
                self._place.clear_leftovers()
            self._place.write(self._pieces)
        except BaseException:
            self._cancelled.set()
            self._place.give_up()
            raise
        finally:
            self._pieces = []  # copies, where it is asynchronous

    def _commit(self) -> None:
        described, self._described = self._described, None
        if self._ranks.is_first and described is not None:
            self._place.commit(described.state, described.aliases)

    def _commit_when_all_is_there(self) -> None:
        if self._ranks.is_first:
            self._await_shares()
            self._commit()

    def _await_shares(self) -> None:
        """Returns when all shares are on the disk. One that grows is waited for, however slow the disk is."""
        nbytes, pause_s = -1, _POLL_S
        limit_s = self._ranks.timeout_s
        while missing := self._place.missing_parts():
            grown = self._place.bytes_so_far()
            if grown != nbytes:
                nbytes, deadline_s = grown, time.monotonic() + limit_s
            if self._ranks.is_broken:  # its share will not come, unless it is on its way; nor does the process end
                deadline_s = min(deadline_s, time.monotonic() + _LAST_SHARES_S)
                limit_s = _LAST_SHARES_S
            if self._cancelled.is_set() or time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"checkpoint '{self._place.path}': the shares of ranks {missing} are not there and do not grow, so "
                    "it stays incomplete. Those ranks may have failed, and say why, or do not see the same folder"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _log_failure(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            LOG.error("asynchronous checkpoint '%s' failed: %s", self._place.path, error)


def _agree_on_id(ranks: Ranks, name: str, digest: int) -> str:
    """What the first rank calls this save.

    Raises:
        CheckpointError: the folder's ``name``, or ``extra``, is not the same on all ranks.
    """
    save_id, first_digest, first_name = ranks.text_of(0, f"{folder.new_save_id()}/{digest}/{name}").split("/", 2)
    with ranks.together():
        if name.encode(errors="replace").decode() != first_name:
            raise CheckpointError(
                f"rank {ranks.rank}: expected every rank to save to one folder, found '{name}' here and '{first_name}' "
                "on the first rank. Give all ranks the same path"
            )
        if int(first_digest) != digest:
            raise CheckpointError(
                f"rank {ranks.rank}: extra is not the same as on the first rank. Give every rank the same, and what "
                "is a rank's own as rank_extra"
            )
    return save_id


def state_of(held: Held, scaler: Any, extra: Any) -> dict[str, Any]:
    """What is not tensors, as ``TensorSource.state`` has it.

    Keys: ``steps``, ``optimizer`` (its class), ``lr`` or ``lr_scheduler``, ``scaler``, ``extra``, ``n_ranks``,
    ``used``, ``orders`` and ``tuned`` (see ``Held``); ``optimizer_name``, ``param_names`` and ``short`` are for whoever
    writes files of Paddle's.
    """
    inner = held.inner
    rate = getattr(inner, "_learning_rate", None)
    scheduler = rate if isinstance(rate, LRScheduler) else None
    return {
        "steps": getattr(held.optimizer, "steps", 0),
        "optimizer": None if inner is None else type(inner).__name__,
        "optimizer_name": getattr(inner, "_name", None) or "",
        "lr": None if inner is None or scheduler else float(inner.get_lr()),
        "lr_scheduler": scheduler_state(scheduler) if scheduler else None,
        "lr_scheduler_class": type(scheduler).__name__ if scheduler else None,
        "scaler": (scaler.state_dict() or None) if scaler is not None else None,
        "extra": extra,
        "n_ranks": held.ranks.n_ranks,
        "used": held.used(),
        "orders": held.orders(),
        "tuned": held.tuned(),
        "param_names": held.param_names(),
        "short": held.short_params(),
    }


def _tensor_piece(share: Share, *, copy: bool) -> Piece:
    blocks: Callable[[], Iterator[npt.NDArray[np.uint8]]] = functools.partial(host_blocks, share.tensor)
    if copy:
        data = copied(share.tensor)
        blocks = functools.partial(iter, [data])
    return Piece(share.name, share.info, share.start, share.stop, blocks)


def _state_pieces(encoded: values.Encoded, name: str) -> list[Piece]:
    """A rank's own state: its JSON as a tensor of bytes, and the arrays in it."""
    text = np.frombuffer(json.dumps(encoded.json).encode(), np.uint8)
    return [array_piece(key, array) for key, array in [(name, text), *encoded.arrays.items()]]
