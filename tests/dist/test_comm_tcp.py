"""The contract of communicators, over TCP connections between processes."""

from __future__ import annotations

import time

import paddle
import pytest

from hp_sharding.comm import create_communicators
from hp_sharding.errors import CommError
from tests import harness
from tests.unit.test_comm_contract import CHECKS, Lanes
from tests.unit.test_comm_wire import WIRE_CHECKS

ALL_CHECKS = {**WIRE_CHECKS, **CHECKS}
ENDS_THE_LANES = "a_failure_of_what_it_follows_is_its_own"


def _run_checks(rank: int, nranks: int, names: list[str]) -> None:
    lanes = Lanes(create_communicators(range(nranks), ["one", "two"], timeout_s=60))
    for name in names:
        ALL_CHECKS[name](lanes)
    for comm in lanes.values():
        comm.close()


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", list(ALL_CHECKS))
def test_contract(name: str, nranks: int) -> None:
    harness.run(_run_checks, nranks, [name])


def test_contract_four_ranks() -> None:
    harness.run(_run_checks, 4, [name for name in ALL_CHECKS if name != ENDS_THE_LANES])


def _carry_otherwise(rank: int, nranks: int, op: str) -> str:
    """All of one kind and size and label; only what travels, or what it becomes, differs from rank to rank."""
    comm = create_communicators(range(nranks), ["differs"], timeout_s=20)["differs"]
    dtype = ("bfloat16", "float16")[rank]
    part, whole = paddle.zeros([8]), paddle.zeros([8 * nranks])
    starts = {
        "all_gather": lambda: comm.all_gather(paddle.zeros([8 * nranks], dtype), part),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole, wire_dtype=dtype),
        "all_reduce": lambda: comm.all_reduce(whole, wire_dtype=dtype),
        "output": lambda: comm.reduce_scatter(paddle.zeros([8], ("float32", "float16")[rank]), whole.cast("float16")),
    }
    try:
        with pytest.raises(CommError) as caught:
            starts[op]().wait()
    finally:
        comm.close()
    return str(caught.value)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "output"])
def test_ranks_that_carry_something_else_are_told_what(op: str) -> None:
    expected = {
        "all_gather": ("float32 as bfloat16 into bfloat16", "float32 as float16 into float16"),
        "output": ("(float16 as float16 into float32)", "(float16)"),
    }.get(op, ("float32 as bfloat16 into float32", "float32 as float16 into float32"))
    for text in harness.run(_carry_otherwise, 2, op):
        assert "gone different ways" in text
        assert all(each in text for each in expected), text


def _small_tensors(rank: int, nranks: int) -> list[float]:
    comm = create_communicators(range(nranks), ["small"], timeout_s=60)["small"]
    total = paddle.full([10], float(rank))
    comm.all_reduce(total).wait()
    ranks = paddle.zeros([nranks], "int64")
    comm.all_gather(ranks, paddle.to_tensor([rank])).wait()
    shard = paddle.zeros([20_000])
    comm.reduce_scatter(shard, paddle.full([nranks * 20_000], float(rank))).wait()
    comm.close()
    return [float(total[3]), *ranks.tolist(), float(shard[-1])]


def test_eight_ranks() -> None:
    assert harness.run(_small_tensors, 8) == [[28.0, *range(8), 28.0]] * 8


def _submit_cost_us(rank: int, nranks: int) -> float:
    comm = create_communicators(range(nranks), ["cost"], timeout_s=60)["cost"]
    shard, full = paddle.zeros([10]), paddle.zeros([10 * nranks])
    costs = []
    for _ in range(50):
        begin_s = time.perf_counter()
        works = [comm.reduce_scatter(shard, full, label="bucket 3 of blocks.1") for _ in range(10)]
        costs.append((time.perf_counter() - begin_s) / 10)
        for work in works:
            work.wait()
    comm.close()
    return sorted(costs)[len(costs) // 4] * 1e6


def test_submitting_is_cheap() -> None:
    # The machine may be busy: the lower quartile, and four times what it takes on an idle one.
    assert max(harness.run(_submit_cost_us, 2)) < 320
