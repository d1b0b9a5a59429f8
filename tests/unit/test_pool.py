"""``StoragePool``: memory comes back when nothing aliases it, and not a moment earlier."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base.framework import EagerParamBase

from hp_sharding.pool import StoragePool
from tests.fakes import PoisoningPool
from tests.harness import machine_env

NUMEL = 24


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_the_same_memory_is_handed_out_again(dtype: str) -> None:
    pool = StoragePool()
    first = pool.alloc(NUMEL, dtype)
    assert (first.shape, first.dtype) == ([NUMEL], getattr(paddle, dtype))
    address, held = first.data_ptr(), pool.allocated_bytes
    assert held == NUMEL * first.element_size()
    del first
    again = pool.alloc(NUMEL, dtype)
    assert (again.data_ptr(), pool.allocated_bytes) == (address, held)
    other = pool.alloc(NUMEL, dtype)
    assert other.data_ptr() != address
    assert pool.allocated_bytes == 2 * held


def test_the_smallest_block_that_fits_serves_any_dtype() -> None:
    pool = StoragePool()
    large, small = pool.alloc(4 * NUMEL, "float32"), pool.alloc(NUMEL, "float32")
    large_address, small_address = large.data_ptr(), small.data_ptr()
    del large, small
    first, second = pool.alloc(NUMEL, "bfloat16"), pool.alloc(NUMEL, "bfloat16")
    assert (first.data_ptr(), second.data_ptr()) == (small_address, large_address)
    assert pool.allocated_bytes == 5 * NUMEL * 4


def test_a_small_tensor_does_not_take_a_large_block() -> None:
    pool = StoragePool()
    large = pool.alloc(100 * NUMEL, "float32")
    address = large.data_ptr()
    del large
    small = pool.alloc(NUMEL, "float32")
    assert pool.alloc(100 * NUMEL, "float32").data_ptr() == address, "it was not given up either"
    assert small.data_ptr() != address
    assert pool.allocated_bytes == 101 * NUMEL * 4


def test_trim_gives_back_what_nobody_uses() -> None:
    pool = StoragePool()
    used, unused = pool.alloc(NUMEL, "float32"), pool.alloc(2 * NUMEL, "float32")
    del unused
    pool.trim()
    assert pool.allocated_bytes == NUMEL * 4
    del used
    pool.trim()
    assert pool.allocated_bytes == 0


def test_there_are_never_more_blocks_than_tensors_alive_at_a_time() -> None:
    pool = StoragePool()
    for numel in (1, 5, 3, 9, 2, 7):
        del_me = (pool.alloc(numel, "float32"), pool.alloc(numel, "float32"))
        del del_me
    assert pool.allocated_bytes == 2 * 9 * 4


def test_a_block_that_came_back_is_poisoned() -> None:
    blocks: list[np.ndarray[Any, Any]] = []
    pool = StoragePool(poison=blocks.append)
    tensor = pool.alloc(NUMEL, "bfloat16")
    assert blocks == []
    del tensor
    assert [(str(block.dtype), block.shape) for block in blocks] == [("uint8", (2 * NUMEL,))]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_ranges_can_be_zeroed(dtype: str) -> None:
    pool = PoisoningPool()
    tensor = pool.alloc(NUMEL, dtype)
    pool.zero(tensor, [(2, 5), (7, 7), (20, NUMEL)])
    zeros = {2, 3, 4, 20, 21, 22, 23}
    assert [index for index, value in enumerate(tensor.astype("float64").numpy()) if value == 0] == sorted(zeros)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_the_poisoning_pool_hands_out_nan(dtype: str) -> None:
    pool = PoisoningPool()
    for _ in range(2):
        tensor = pool.alloc(NUMEL, dtype)
        assert np.isnan(tensor.astype("float64").numpy()).all()
        tensor.zero_()
        del tensor


@pytest.mark.parametrize("alias", ["slice", "shared", "detached", "numpy", "dlpack", "int16"])
def test_an_alias_keeps_the_block(alias: str) -> None:
    pool = PoisoningPool()
    tensor = pool.alloc(NUMEL, "float32")
    tensor.fill_(1.0)
    address = tensor.data_ptr()
    held: object
    if alias == "slice":
        held = tensor._slice(2, 5)
    elif alias == "shared":
        held = paddle.empty([NUMEL])
        tensor._share_buffer_to(held)
    elif alias == "detached":
        held = tensor.detach()
    elif alias == "numpy":
        held = np.from_dlpack(tensor)
    elif alias == "dlpack":
        held = paddle.from_dlpack(tensor)
    else:
        held = tensor.view("int16")
    del tensor
    assert pool.alloc(NUMEL, "float32").data_ptr() != address
    del held
    found = {pool.alloc(NUMEL, "float32").data_ptr()}
    tensors = [pool.alloc(NUMEL, "float32") for _ in range(2)]
    found.update(tensor.data_ptr() for tensor in tensors)
    assert address in found


_USES: dict[str, Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "transposed": lambda x, w: x @ w.T.T,
    "sliced": lambda x, w: x[:, :2] @ w[:2],
    "einsum": lambda x, w: paddle.einsum("bi,io->bo", x, w),
    "unsqueezed": lambda x, w: (x.unsqueeze(1) @ w.unsqueeze(0)).squeeze(1),
    "reshaped": lambda x, w: x @ w.reshape([-1]).reshape([4, 6]),
    "normed": lambda x, w: x @ (w / w.norm()),
    "split": lambda x, w: x @ paddle.concat([part * part for part in paddle.split(w, 2, axis=1)], axis=1),
}


@pytest.mark.parametrize("use", list(_USES))
def test_what_autograd_saved_keeps_the_block(use: str) -> None:
    """The parameter loses its memory between forward and backward, as it does when a bucket is freed."""
    paddle.seed(0)
    value, x = paddle.randn([4, 6]), paddle.randn([3, 4])
    x.stop_gradient = False
    plain = EagerParamBase.from_tensor(value, trainable=True)
    (_USES[use](x, plain) ** 2).sum().backward()
    expected = x.grad.numpy().copy()
    x.clear_gradient(False)

    pool = PoisoningPool()
    block = pool.alloc(NUMEL, "float32")
    block.copy_(value.reshape([-1]), False)
    address = block.data_ptr()
    param = EagerParamBase(shape=[4, 6], dtype="float32")
    block._share_buffer_to(param)
    loss = (_USES[use](x, param) ** 2).sum()
    paddle.Tensor.get_tensor(param)._clear()
    del block
    others = [pool.alloc(NUMEL, "float32") for _ in range(3)]
    others[0]._share_buffer_to(param)  # what the next gather does
    others[0].copy_(value.reshape([-1]), False)
    loss.backward()
    assert np.array_equal(x.grad.numpy(), expected)
    del loss, others, param
    assert address in {tensor.data_ptr() for tensor in [pool.alloc(NUMEL, "float32") for _ in range(4)]}
    assert pool.allocated_bytes <= 4 * NUMEL * 4, "blocks did not come back"


def test_a_tensor_may_outlive_its_pool() -> None:
    pool = PoisoningPool()
    tensor = pool.alloc(NUMEL, "float32")
    tensor.fill_(3.0)
    del pool
    assert (tensor.numpy() == 3).all()
    del tensor


_TWO_THREADS = """
import threading, time
from hp_sharding.pool import StoragePool

pool = StoragePool(poison=lambda block: time.sleep(0.3))
tensors = [pool.alloc(8, "float32"), pool.alloc(8, "float32")]
thread = threading.Thread(target=tensors.pop)
thread.start()
time.sleep(0.1)
tensors.pop()
pool.alloc(8, "float32")
thread.join()
"""


def test_blocks_may_come_back_in_two_threads_at_once() -> None:
    """In a process of its own: a deadlock below Python cannot be ended otherwise."""
    subprocess.run([sys.executable, "-c", _TWO_THREADS], timeout=200, check=True, env={**os.environ, **machine_env()})
