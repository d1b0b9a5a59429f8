"""The first collective in which ranks differ is found and named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from hp_sharding.comm import Communicator, fingerprint
from hp_sharding.comm.fingerprint import Fingerprint
from hp_sharding.comm.local import LocalCommunicator
from hp_sharding.errors import CommError
from tests.unit.test_comm_contract import Gate

RANKS = (4, 7, 9)


class _Table:
    """Gathers between threads."""

    def __init__(self) -> None:
        self.rows: list[Any] = [None] * len(RANKS)
        self.barrier = threading.Barrier(len(RANKS), timeout=20)

    def swap(self, rank: int, row: Any) -> Any:
        self.rows[rank] = row
        self.barrier.wait()
        found = np.concatenate(self.rows)
        self.barrier.wait()
        return found


class _Seat(LocalCommunicator):
    """One rank's place at the table."""

    def __init__(self, table: _Table, rank: int) -> None:
        super().__init__("fingerprint", (0,))
        self.ranks, self.rank = RANKS, rank
        self._table = table

    def all_gather(
        self, output: Any, input: Any, *, label: str = "", after: Any = None, wire_dtype: str | None = None
    ) -> Gate:
        output.copy_(paddle.to_tensor(self._table.swap(self.rank, input.numpy())), False)
        done = Gate()
        done.open()
        return done


Launch = Callable[[int, dict[str, Communicator]], None]


def _compare(launch: Launch, n_steps: int = 2) -> list[CommError | None]:
    """Each rank's error, after every rank has launched and compared ``n_steps`` times."""
    table = _Table()
    found: list[CommError | None] = [None] * len(RANKS)

    def run(rank: int) -> None:
        one = Fingerprint(_Seat(table, rank))
        lanes = one.watch({name: LocalCommunicator(name, (0,)) for name in ("gather", "reduce")})
        try:
            for _ in range(n_steps):
                launch(rank, lanes)
                one.check()
        except CommError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(RANKS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def _both(
    lanes: dict[str, Communicator],
    *,
    numel: int = 4,
    label: str = "blocks.1",
    dtype: str = "float32",
    result: str | None = None,
    wire: str | None = None,
) -> None:
    lanes["gather"].all_reduce(paddle.zeros([2]), label="norm")
    output = paddle.zeros([numel], result or dtype)
    lanes["reduce"].reduce_scatter(output, paddle.zeros([numel], dtype), label=label, wire_dtype=wire)


def test_the_same_on_all_ranks_is_no_difference() -> None:
    assert _compare(lambda rank, lanes: _both(lanes), n_steps=3) == [None] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"numel": 8},
        {"label": "blocks.2"},
        {"dtype": "float16"},
        {"dtype": "float16", "result": "float32"},
        {"wire": "bfloat16"},
        {"wire": "float16", "result": "float16"},
    ],
    ids=str,
)
def test_the_first_difference_is_named(settings: dict[str, Any]) -> None:
    def launch(rank: int, lanes: dict[str, Communicator]) -> None:
        _both(lanes)
        _both(lanes, **(settings if rank == 1 else {}))

    errors = _compare(launch)
    for rank, error in enumerate(errors):
        assert error is not None
        assert "number 1 on lane 'reduce'" in str(error)
        assert f"rank {RANKS[rank]} has reduce_scatter of" in str(error)
        assert (error.rank, error.peer) == (RANKS[rank], RANKS[0] if rank == 1 else RANKS[1])
        for word in map(str, settings.values()):
            assert word in str(error)


def test_who_launches_less_is_named() -> None:
    def launch(rank: int, lanes: dict[str, Communicator]) -> None:
        _both(lanes)
        if rank != 2:
            lanes["gather"].broadcast(paddle.zeros([3]), src=0, label="order")

    errors = _compare(launch)
    for error in errors:
        assert "number 1 on lane 'gather'" in str(error)
        assert "broadcast from 0 of 3 elements of float32 labelled 'order'" in str(error)
        assert f"rank {RANKS[2]} has nothing more" in str(error)


def test_every_check_begins_anew() -> None:
    steps = [0] * len(RANKS)

    def launch(rank: int, lanes: dict[str, Communicator]) -> None:
        _both(lanes)
        steps[rank] += 1
        if steps[rank] == 2 and rank == 0:
            lanes["gather"].all_gather(paddle.zeros([1]), paddle.zeros([1]), label="blocks.0")

    errors = _compare(launch, n_steps=3)
    assert all("the end of step 2: as number 1 on lane 'gather'" in str(error) for error in errors)


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_asks_for_it(value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HP_SHARDING_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("HP_SHARDING_DEBUG", value)
    assert fingerprint.is_wanted() == wanted
