"""Files of whole tensors: plain Paddle continues from those we write, and we read those that it writes."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy
import safetensors.paddle
from paddle import nn
from paddle.optimizer.lr import StepDecay

from hp_sharding.checkpoint.full_state import FullMoment, FullParam, FullState
from hp_sharding.checkpoint.paddle_names import ACCUMULATORS, owner_of, without_optimizer_name
from hp_sharding.checkpoint.source import MODEL, STORAGE, TensorInfo
from hp_sharding.checkpoint.whole_files import WholeFiles, write_paddle, write_safetensors
from hp_sharding.errors import CheckpointError
from tests.pickled import NamedTensor, write_pickled
from tests.unit.test_checkpoint_pickled import LOADS, _assert_same

WRITES = {"paddle": write_paddle, "safetensors": write_safetensors}
SHAPES = {"float32": (4, 5), "bfloat16": (3, 3), "float16": (7,), "bool": (5,), "int64": (), "uint8": (0, 2)}


class _Net(nn.Layer):
    """With buffers, and a tied weight whose second name comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1D(4)
        self.tied = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.tied.weight
        self.register_buffer("count", paddle.to_tensor(3))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.last(self.tied(self.norm(self.first(x))))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: paddle.optimizer.AdamW(StepDecay(0.1, 2), parameters=params, weight_decay=0.1),
    "AMSGrad": lambda params: paddle.optimizer.Adam(0.1, parameters=params, amsgrad=True),
    "Momentum": lambda params: paddle.optimizer.Momentum(0.1, parameters=params),
    "SGD": lambda params: paddle.optimizer.SGD(StepDecay(0.1, 2), parameters=params),
    "RMSProp": lambda params: paddle.optimizer.RMSProp(0.1, momentum=0.5, parameters=params),
    "Adadelta": lambda params: paddle.optimizer.Adadelta(0.1, parameters=params),
    "with a name": lambda params: paddle.optimizer.AdamW(StepDecay(0.1, 2), parameters=params, name="my_own"),
    "with names like ours": lambda params: paddle.optimizer.Adamax(0.1, parameters=params, name="moment1"),
}


class _Training:
    """As a process that has made nothing else: Paddle's counters of names begin at 0."""

    def __init__(self, optimizer: str = "AdamW", dtype: str = "float32") -> None:
        with paddle.utils.unique_name.guard():
            paddle.seed(5)
            self.model = _Net()
            self.model.to(dtype=dtype)
            self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, numbers: range) -> None:
        with paddle.utils.unique_name.guard():
            for number in numbers:
                x = np.random.default_rng(number).standard_normal((6, 3)).astype(np.float32)
                self.model(paddle.to_tensor(x)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.clear_grad()
                if isinstance(self.optimizer._learning_rate, StepDecay):
                    self.optimizer._learning_rate.step()

    def save(self, prefix: Path) -> None:
        paddle.save(self.model.state_dict(), f"{prefix}.pdparams")
        paddle.save(self.optimizer.state_dict(), f"{prefix}.pdopt")

    def load(self, prefix: Path) -> None:
        self.model.set_state_dict(paddle.load(f"{prefix}.pdparams"))
        self.optimizer.set_state_dict(paddle.load(f"{prefix}.pdopt"))

    def full_state(self) -> FullState:
        inner, state = self.optimizer, self.model.state_dict()
        firsts: dict[str, str] = {}
        for structured, tensor in state.items():
            firsts.setdefault(tensor.name, structured)
        params = [self._param(structured, state[structured]) for structured in firsts.values()]
        prefix = f"{inner._name}_" if inner._name else ""
        owners = firsts | {master.name: firsts[name] for name, master in inner._master_weights.items()}
        moments = [
            FullMoment(owners[name], kind.removeprefix(prefix), TensorInfo(tuple(tensor.shape), "float32"))
            for kind, of_kind in inner._accumulators.items()
            for name, tensor in of_kind.items()
        ]
        aliases = {key: firsts[tensor.name] for key, tensor in state.items() if firsts[tensor.name] != key}
        scheduler = inner._learning_rate.state_dict() if isinstance(inner._learning_rate, StepDecay) else None
        return FullState(params, aliases, moments, True, inner._name or "", {"lr_scheduler": scheduler, "steps": 3})

    def _param(self, structured: str, tensor: Any) -> FullParam:
        dtype = str(tensor.dtype).removeprefix("paddle.")
        held = "float32" if tensor.name in self.optimizer._master_weights else dtype
        return FullParam(structured, tensor.name, TensorInfo(tuple(tensor.shape), held), dtype)

    def fetch(self, name: str) -> Any:
        kind, _, rest = name.partition("/")
        if kind == "model":
            tensor = self.model.state_dict()[rest]
            return self.optimizer._master_weights.get(tensor.name, tensor).numpy()
        structured, _, moment = rest.partition("/")
        prefix = f"{self.optimizer._name}_" if self.optimizer._name else ""
        owner = self.model.state_dict()[structured]
        owner = self.optimizer._master_weights.get(owner.name, owner)
        return self.optimizer._accumulators[prefix + moment][owner.name].numpy()


def _contents(source: WholeFiles) -> dict[str, Any]:
    return {name: source.read(name, 0, info.numel).reshape(info.shape) for name, info in source.tensors.items()}


def _assert_same_items(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """In any order."""
    _assert_same(_in_order(found), _in_order(expected))


def _in_order(value: Any) -> Any:
    return {key: _in_order(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_paddle_continues_from_ours_as_from_its_own(tmp_path: Path, optimizer: str) -> None:
    saved = _Training(optimizer)
    saved.step(range(3))
    saved.save(tmp_path / "theirs")
    write_paddle(tmp_path / "ours", saved.full_state(), saved.fetch)
    for ending in ("pdparams", "pdopt"):
        for load in LOADS.values():
            _assert_same_items(load(f"{tmp_path / 'ours'}.{ending}"), load(f"{tmp_path / 'theirs'}.{ending}"))
    saved.step(range(3, 5))
    for name in ("ours", "theirs"):
        # Before the first step, and after one that has made other moments.
        for steps_before in (0, 1):
            loaded = _Training(optimizer)
            loaded.step(range(7, 7 + steps_before))
            loaded.load(tmp_path / name)
            loaded.step(range(3, 5))
            _assert_same(_values(loaded), _values(saved))


def _values(training: _Training) -> list[Any]:
    return [tensor.numpy() for tensor in training.model.state_dict().values()]


@pytest.mark.parametrize("format_", WRITES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reads_logical_names(tmp_path: Path, optimizer: str, format_: str) -> None:
    saved = _Training(optimizer)
    saved.step(range(3))
    state = saved.full_state()
    WRITES[format_](tmp_path / "ours", state, saved.fetch)
    expected = {f"{MODEL}{param.structured}": saved.fetch(f"{MODEL}{param.structured}") for param in state.params}
    for structured, moment, _ in state.moments:
        name = f"optimizer/{structured}/{moment}"
        expected[name] = saved.fetch(name)
    source = WholeFiles(tmp_path / "ours")
    _assert_same_items(_contents(source), expected)
    assert source.aliases == {"model/last.weight": "model/tied.weight"}
    assert source.state["lr_scheduler"] == state.state["lr_scheduler"]
    assert source.state.get("steps") == (3 if format_ == "safetensors" else None)
    if format_ == "paddle":
        # However the names in the saving process were counted, and whatever it is that made the files.
        saved.save(tmp_path / "theirs")
        for path in ("theirs", "theirs.pdopt", "theirs.pdparams"):
            _assert_same_items(_contents(WholeFiles(tmp_path / path)), expected)


def _create_masters(training: _Training) -> None:
    """As a first step would: on this device no kernel updates 16-bit parameters."""
    inner = training.optimizer
    inner._multi_precision = True
    params = [param for param in training.model.parameters() if not param.stop_gradient]
    with paddle.utils.unique_name.guard():
        inner._create_accumulators(paddle.base.framework.default_main_program().global_block(), params)
    for number, master in enumerate(inner._master_weights.values()):
        # What 16 bits do not hold, and half way between what they do.
        noise = np.random.default_rng(number).standard_normal(master.shape).astype(np.float32)
        noise.reshape(-1)[:2] = (1 + 2**-8, 1 + 3 * 2**-8)
        master.set_value(paddle.to_tensor(noise))
    for param in params:
        paddle.assign(inner._master_weights[param.name].astype(param.dtype), param)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Momentum", "with a name"])
def test_masters(tmp_path: Path, optimizer: str, dtype: str) -> None:
    saved = _Training(optimizer, dtype)
    _create_masters(saved)
    saved.save(tmp_path / "theirs")
    state = saved.full_state()
    assert state.has_masters
    write_paddle(tmp_path / "ours", state, saved.fetch)
    for ending in ("pdparams", "pdopt"):
        ours, theirs = (paddle.load(str(tmp_path / f"{name}.{ending}")) for name in ("ours", "theirs"))
        _assert_same_items(ours, theirs)
    write_safetensors(tmp_path / "others", state, saved.fetch)
    assert str(safetensors.paddle.load_file(tmp_path / "others.safetensors")["tied.weight"].dtype) == f"paddle.{dtype}"
    for name in ("ours", "theirs", "others"):
        source = WholeFiles(tmp_path / name)
        for param in state.params:
            logical = f"{MODEL}{param.structured}"
            assert source.tensors[logical] == param.info
            assert source.file_of(logical).endswith("pdopt" if param.has_master else "pdparams") or name == "others"
            _assert_same(source.read(logical, 0, param.info.numel), saved.fetch(logical).reshape(-1))
        assert len(source.tensors) == len(state.params) + len(state.moments)
    loaded = _Training(optimizer, dtype)
    loaded.load(tmp_path / "ours")
    with paddle.utils.unique_name.guard():
        params = [param for param in loaded.model.parameters() if not param.stop_gradient]
        loaded.optimizer._multi_precision = True
        loaded.optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), params)
    _assert_same(loaded.optimizer.state_dict(), saved.optimizer.state_dict())


def test_without_an_optimizer_the_weights_are_rounded(tmp_path: Path) -> None:
    state = FullState([FullParam("w", "w_0", TensorInfo((2,), "float32"), "bfloat16")])
    for write in WRITES.values():
        write(tmp_path / "ours", state, lambda name: np.array([1 + 2**-8, np.nan], np.float32))
    for ending in (".pdparams", ".safetensors"):
        source = WholeFiles(tmp_path / f"ours{ending}")
        assert source.tensors == {"model/w": TensorInfo((2,), "bfloat16")}
        assert source.read("model/w", 0, 2).tolist() == [0x3F80, 0x7FC0]
        assert source.state == {}


# -- safetensors -------------------------------------------------------------------------------------------------------


def _of_all_dtypes() -> tuple[FullState, Callable[[str], Any]]:
    rng = np.random.default_rng(1)
    arrays = {
        f"{MODEL}{name}": (rng.standard_normal(shape) * 9).astype(STORAGE[name]).reshape(shape)
        for name, shape in SHAPES.items()
    }
    params = [FullParam(name, f"p_{name}", TensorInfo(shape, name), name) for name, shape in SHAPES.items()]
    return FullState(params, {"again": "float32"}), arrays.__getitem__


def test_the_library_reads_our_safetensors(tmp_path: Path) -> None:
    state, fetch = _of_all_dtypes()
    write_safetensors(tmp_path / "ours", state, fetch)
    path = tmp_path / "ours.safetensors"
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pd", "hp_sharding.tied": '{"again": "float32"}'}
    found = safetensors.paddle.load_file(path)
    assert sorted(found) == sorted(SHAPES)
    for name, tensor in found.items():
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"paddle.{name}", SHAPES[name])
        assert tensor.numpy().tobytes() == fetch(f"{MODEL}{name}").tobytes()


def test_reads_safetensors_of_others(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(5), "c": np.array(2, np.float16)}
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors")
    source = WholeFiles(tmp_path / "theirs")
    _assert_same_items(_contents(source), {f"{MODEL}{name}": array for name, array in arrays.items()})
    assert source.read("model/b", 2, 4).tolist() == [2, 3]
    assert (source.aliases, source.state) == ({}, {})


def test_safetensors_keep_the_whole_state(tmp_path: Path) -> None:
    extra = {"numbers": [1, (2, None)], "nan": float("inf"), "array": np.arange(4000.0), "tensor": paddle.ones([3])}
    state = FullState([], {}, [], True, "", {"steps": 7, "extra": extra})
    write_safetensors(tmp_path / "ours", state, dict[str, Any]().__getitem__)
    _assert_same(WholeFiles(tmp_path / "ours").state["extra"]["array"], extra["array"])
    found = WholeFiles(tmp_path / "ours")
    assert found.state["extra"]["numbers"] == extra["numbers"]
    assert found.state["steps"] == 7
    assert found.tensors == {}


# -- what is damaged, or does not belong together ----------------------------------------------------------------------


@pytest.mark.parametrize("format_", WRITES)
def test_finds_what_is_cut_off(tmp_path: Path, format_: str) -> None:
    saved = _Training()
    saved.step(range(1))
    WRITES[format_](tmp_path / "ours", saved.full_state(), saved.fetch)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for length in [*range(0, len(data), 97), len(data) - 1]:
            path.write_bytes(data[:length])
            with pytest.raises(CheckpointError, match="cut off") as caught:
                WholeFiles(tmp_path / "ours")
            assert caught.value.file == str(path)
        path.write_bytes(data)
    WholeFiles(tmp_path / "ours").verify()


def test_finds_a_damaged_header(tmp_path: Path) -> None:
    path = tmp_path / "ours.safetensors"
    write_safetensors(tmp_path / "ours", *_of_all_dtypes())
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(0)
    outcomes = set()
    for at in rng.choice(8 + length, 300, replace=False):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        try:
            outcomes.add(str(sorted(_contents(WholeFiles(path)))))  # a name can change unseen
        except CheckpointError as error:
            outcomes.add(str(error))
    assert len(outcomes) > 30
    header = json.loads(data[8 : 8 + length])
    del header["int64"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"header is damaged: nothing begins at byte"):
        WholeFiles(path)


def test_names_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pdparams and .*none\.safetensors are both not there"):
        WholeFiles(tmp_path / "none")
    for write in WRITES.values():
        write(tmp_path / "both", *_of_all_dtypes())
    with pytest.raises(CheckpointError, match=r"both\.pdparams and .*both\.safetensors are both there: name the one"):
        WholeFiles(tmp_path / "both")
    assert WholeFiles(tmp_path / "both.safetensors").where == str(tmp_path / "both")
    os.unlink(tmp_path / "both.safetensors")
    with pytest.raises(CheckpointError, match=r"both\.safetensors cannot be read: No such file"):
        WholeFiles(tmp_path / "both.optimizer.safetensors")


def _pair(folder: Path, weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Path:
    write_pickled(folder / "pair.pdparams", weights)
    write_pickled(folder / "pair.pdopt", optimizer)
    return folder / "pair"


W = NamedTensor("linear_0.w_0", np.ones((2, 2), np.float32))
FLAT = NamedTensor(W.name, np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("weights", "optimizer", "message"),
    [
        ({"w": W}, {"linear_1.w_0_m_0": W}, r"pair\.pdopt: linear_1\.w_0_m_0 belong to no parameter in .*pair"),
        ({"w": W}, {"linear_0.w_0_moment1": W}, r"linear_0\.w_0_moment1 belong to no parameter"),
        ({"w": W}, {"master_weights": {"v": W}}, r"pair\.pdopt: v belong to no parameter"),
        ({"w": W}, {"master_weights": {W.name: FLAT}}, r"master weight of w has shape"),
        ({"w": W}, {"linear_0.w_0_m_0": W, "linear_0.w_0_m_1": W}, r"linear_0\.w_0_m_1 is a second m of one parameter"),
        ({"w": W}, {"epoch": 3}, r"holds a int under 'epoch'"),
        ({"w": W, "epoch": 3}, {}, r"pair\.pdparams holds a int under 'epoch'"),
        ({"model": {"w": W}}, {}, r"pair\.pdparams holds a dict under 'model'"),
        ({"w": NamedTensor("", np.ones(2, np.complex64))}, {}, r"complex64, which is none of"),
    ],
)  # fmt: skip
def test_refuses_what_does_not_belong(tmp_path: Path, weights: Any, optimizer: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        WholeFiles(_pair(tmp_path, weights, optimizer))
    assert caught.value.file.startswith(str(tmp_path / "pair.pd"))


def test_safetensors_of_different_saves(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    safetensors.numpy.save_file({"v/moment1": np.ones(2, np.float32)}, tmp_path / "a.optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"v/moment1 belongs to no parameter in .*a\.safetensors"):
        WholeFiles(tmp_path / "a")


def test_one_name_twice_is_not_always_a_tied_parameter(tmp_path: Path) -> None:
    # Two models, each saved by a process of its own, in one file.
    other = NamedTensor(W.name, np.zeros((2, 2), np.float32))
    source = WholeFiles(_pair(tmp_path, {"a": W, "b": other, "c": W, "d": FLAT, "e": NamedTensor("", W.array)}, {}))
    assert source.aliases == {"model/c": "model/a"}
    assert list(source.tensors) == ["model/a", "model/b", "model/d", "model/e"]


def test_the_longest_name_owns() -> None:
    owners = {"w": "short", "w_m": "longer", "w_m_0_fp32_master_0": "master"}
    assert owner_of("w_velocity_0", owners) == ("short", "velocity")
    assert owner_of("w_m_0", owners) == ("short", "m")
    assert owner_of("w_m_moment1_12", owners) == ("longer", "moment1")
    assert owner_of("w_m_0_fp32_master_0_moment1_0", owners) == ("master", "moment1")
    assert owner_of("w_fp32_master_3_beta1_pow_acc_0", owners) == ("short", "beta1_pow_acc")
    assert owner_of("w__avg_squared_grad_0", owners) == ("short", "_avg_squared_grad")
    assert owner_of("wmoment1_0", owners) is owner_of("w_moment1", owners) is owner_of("w_0", owners) is None


def test_the_optimizers_name_is_taken_off() -> None:
    for prefix in ("", "mine_", "moment1_", "a_b_"):
        names = [f"{prefix}{accumulator}" for accumulator in ACCUMULATORS]
        assert without_optimizer_name(names) == dict(zip(names, ACCUMULATORS, strict=True))
    # An optimizer of the user's own that has several of a kind.
    assert without_optimizer_name(["slow_moment", "fast_moment"]) == {
        name: name for name in ("slow_moment", "fast_moment")
    }


# -- how they are written ----------------------------------------------------------------------------------------------


NUMEL = 1 << 21


def _large(n_params: int) -> FullState:
    info = TensorInfo((NUMEL,), "float32")
    params = [FullParam(f"p{n}", f"linear_{n}.w_0", info, ("float32", "bfloat16")[n % 2]) for n in range(n_params)]
    return FullState(params, {}, [FullMoment(param.structured, "moment1", info) for param in params], True)


@pytest.mark.parametrize("format_", WRITES)
def test_fetches_in_order_and_holds_one(tmp_path: Path, format_: str) -> None:
    state, fetched = _large(4), []

    def fetch(name: str) -> Any:
        fetched.append(name)
        return np.full(NUMEL, len(fetched), np.float32)

    WRITES[format_](tmp_path / "warm", state, fetch)
    fetched.clear()
    tracemalloc.start()
    try:
        WRITES[format_](tmp_path / "ours", state, fetch)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A tensor has 8 MiB, and blocks of it are rounded.
    assert 8 * 2**20 <= peak < 10 * 2**20
    names = [param.structured for param in state.params]
    assert fetched == [f"model/{name}" for name in names] + [f"optimizer/{name}/moment1" for name in names]
    source = WholeFiles(tmp_path / "ours")
    assert [source.read(name, 9, 10)[0] for name in fetched] == list(range(1, len(fetched) + 1))


@pytest.mark.parametrize("format_", WRITES)
def test_a_failure_leaves_what_was_there(tmp_path: Path, format_: str) -> None:
    state = _large(3)
    WRITES[format_](tmp_path / "ours", state, lambda name: np.zeros(NUMEL, np.float32))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2

    def fetch(name: str) -> Any:
        if name == "optimizer/p1/moment1":
            raise OSError("a rank is gone")
        return np.ones(NUMEL, np.float32)

    with pytest.raises(OSError, match="a rank is gone") as caught:
        WRITES[format_](tmp_path / "ours", state, fetch)
    # The traceback keeps the writers: they are not only cleaned up when they are forgotten.
    assert caught.tb is not None
    assert {path.name for path in tmp_path.iterdir()} == set(before)
    for wrong, said in ((np.ones(NUMEL), r"float64 of \[2097152\]"), (np.ones(3, np.float32), r"float32 of \[3\]")):
        with pytest.raises(CheckpointError, match=rf"model/p0 should be float32 of shape \[2097152\], but is {said}"):
            WRITES[format_](tmp_path / "ours", state, dict.fromkeys(["model/p0"], wrong).__getitem__)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_is_made_and_a_file_in_its_place_named(tmp_path: Path) -> None:
    write_paddle(tmp_path / "new" / "folder" / "ours", *_of_all_dtypes())
    assert os.listdir(tmp_path / "new" / "folder") == ["ours.pdparams"]
    with pytest.raises(CheckpointError, match=r"ours\.pdparams cannot be made a folder"):
        write_safetensors(tmp_path / "new" / "folder" / "ours.pdparams" / "x", *_of_all_dtypes())


def test_verify_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / "ours", *_of_all_dtypes())
    source = WholeFiles(tmp_path / "ours")
    for n_parts in (1, 2, 3, 7):
        seen: dict[str, list[int]] = {name: [] for name in source.tensors}

        def read(name: str, start: int, stop: int, seen: dict[str, list[int]] = seen) -> Any:
            seen[name] += range(start, stop)
            return None

        monkeypatch.setattr(source, "read", read)
        for part in range(n_parts):
            source.verify(part, n_parts)
        assert seen == {name: list(range(info.numel)) for name, info in source.tensors.items()}
    monkeypatch.undo()
    nbytes = os.path.getsize(tmp_path / "ours.safetensors") - 50
    os.truncate(tmp_path / "ours.safetensors", nbytes)
    with pytest.raises(CheckpointError, match=f"ends at byte {nbytes}"):
        source.verify()
    source.close()
    source.close()
    with pytest.raises(CheckpointError, match=r"Bad file descriptor \(reading model/float32\)") as caught:
        source.read("model/float32", 0, 1)
    assert caught.value.parameter == "model/float32"
