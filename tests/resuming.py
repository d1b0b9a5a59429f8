"""Trainings that are saved and go on elsewhere: what is trained, and one training of it, sharded or plain."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.optimizer.lr import CosineAnnealingDecay, LRScheduler, StepDecay

from hp_sharding import ShardedOptimizer, full_parameters, shard
from tests import logical
from tests.lanes import wrap
from tests.models import SEED, loss_of, make_batch, make_model
from tests.reference import Values, values
from tests.scalers import make_scaler, scale

VOCABULARY = 10
"""Divides among 2 ranks only."""
WIDTH = 14
"""Matrices of it have more than 128 elements, in which shards are cut: some lie on several ranks."""
ROWS = 12
"""Of the batch of all ranks together, where each has its share: divides among 1, 2, 3 and 4."""
Settings = dict[str, Any]


class Cast(nn.Layer):
    """A linear layer that computes in float32 with parameters of any dtype, as CPUs have to."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([n_in, n_out])
        self.bias = self.create_parameter([n_out], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(x.astype("float32"), self.weight.astype("float32"), self.bias.astype("float32"))


class Odd(nn.Layer):
    """What a checkpoint can get wrong: a vocabulary that does not divide, tied to the output; sizes below the number
    of ranks; parameters that are frozen, never used, used in some steps, or first used in step 4; buffers; dropout.
    """  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.table = self.create_parameter([VOCABULARY, WIDTH])
        self.tied = nn.LayerList([nn.Layer()])
        self.tied[0].add_parameter("weight", self.table)
        self.hidden = nn.LayerList([Cast(WIDTH, 23), Cast(23, WIDTH)])
        self.frozen, self.unused = Cast(WIDTH, WIDTH), nn.Linear(4, 3)
        self.sometimes, self.later = Cast(WIDTH, WIDTH), Cast(WIDTH, WIDTH)
        for param in self.frozen.parameters():
            param.stop_gradient = True
        for name, shape in {"empty": [0], "single": [1], "scalar": [], "three": [3]}.items():
            self.add_parameter(name, self.create_parameter(shape, default_initializer=nn.initializer.Normal(1.0)))
        self.register_buffer("calls", paddle.zeros([2], "int64"))
        self.register_buffer("scratch", paddle.zeros([3]), persistable=False)
        self.dropout = nn.Dropout(0.0)

    def forward(self, tokens: paddle.Tensor, step: int) -> paddle.Tensor:
        with paddle.no_grad():
            self.calls.add_(paddle.to_tensor([1, step], dtype=self.calls.dtype))
        x = self.table.astype("float32")[tokens]
        for layer in self.hidden:
            x = self.dropout(F.gelu(layer(x)))
        x = x + self.frozen(x)
        if step % 3 == 2:
            x = x + self.sometimes(x)
        if step >= 4:
            x = x + self.later(x)
        small = [self.single, self.scalar, self.three, self.empty]
        x = x * sum((param.astype("float32").sum().sin() for param in small), paddle.ones([]))
        return paddle.matmul(x, self.tied[0].weight.astype("float32"), transpose_y=True)


class Made(NamedTuple):
    """An optimizer, its scheduler and a loss scaler, if it has them."""

    optimizer: Any
    scheduler: LRScheduler | None = None
    scaler: Any = None


class Kind(NamedTuple):
    """What is trained.

    Attributes:
        model: makes it.
        optimizer: makes an optimizer over it; its argument is the model.
        loss: of the model in a step, on one of several ranks.
    """

    model: Callable[[], nn.Layer]
    optimizer: Callable[[nn.Layer], Made]
    loss: Callable[[nn.Layer, int, int, int], paddle.Tensor]


class Run:
    """One training, of the kind of that name.

    Attributes:
        model: the model.
        optimizer: sharded, or as ``settings`` say.
        scheduler: of the learning rate, or None.
        scaler: of the loss, or None.

    Args:
        settings: for ``tests.lanes.wrap``; "plain" for what ``shard`` gives in one process, "bare" for Paddle's own.
        seed: of the first values. Those of the generators differ from rank to rank.
    """

    def __init__(self, kind: str, rank: int, nranks: int, settings: Settings | str, *, seed: int = SEED) -> None:
        self.kind, self.rank, self.nranks = KINDS[kind], rank, nranks
        paddle.seed(seed)
        self.model = self.kind.model()
        self.optimizer, self.scheduler, self.scaler = self.kind.optimizer(self.model)
        if isinstance(settings, dict):
            self.model, self.optimizer, _ = wrap(self.model, self.optimizer, nranks, **settings)
        elif settings == "plain":
            self.optimizer = shard(self.model, self.optimizer)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Starts all generators afresh."""
        paddle.seed(seed + self.rank)
        np.random.seed(seed + self.rank)
        random.seed(seed + self.rank)

    def train(self, steps: range, *, alone: bool = False) -> list[float]:
        """Returns the loss of each step; ``alone``: of this rank as of the only one."""
        rank, nranks = (0, 1) if alone else (self.rank, self.nranks)
        losses = []
        for step in steps:
            loss = self.kind.loss(self.model, step, rank, nranks)
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                scale(self.scaler, loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.clear_grad()
            if self.scheduler is not None:
                self.scheduler.step()
            losses.append(float(loss))
        return losses

    def parts(self) -> list[logical.Part]:
        return logical.parts(self.model, self.optimizer)

    def rates(self) -> dict[str, Any]:
        """The learning rate, the states of its scheduler and of the scaler, and the steps counted, if they are."""
        scheduler, scaler = self.scheduler, self.scaler
        return {
            "lr": self.optimizer.get_lr(),
            "steps": getattr(self.optimizer, "steps", 0),
            "scheduler": None if scheduler is None else dict(scheduler.state_dict()),
            "scaler": None if scaler is None else {key: _plain(value) for key, value in scaler.state_dict().items()},
        }

    def orders(self) -> list[list[int]]:
        """In which buckets are reduced, and gathered; none where there are none."""
        if not isinstance(self.optimizer, ShardedOptimizer):
            return []
        return [list(self.optimizer._reducer.order), list(self.optimizer._schedule.gathers.order)]

    def values(self) -> Values:
        """All parameters as layers see them. Collective."""
        with full_parameters(self.model):
            return values(self.model)


def shift_names() -> None:
    """Makes layers that nobody needs, so that Paddle's counters give later parameters other names."""
    for _ in range(3):
        nn.Linear(2, 2)
        nn.Sequential(nn.Embedding(2, 2), nn.Conv2D(1, 1, 1), nn.BatchNorm2D(1), Cast(2, 2))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


# -- kinds -------------------------------------------------------------------------------------------------------------


def _odd(*, dropout: float = 0.0, dtype: str = "float32") -> nn.Layer:
    model = Odd()
    model.dropout.p = dropout
    if dtype != "float32":
        model.to(dtype=dtype)
        model.calls = model.calls.astype("int64")  # which casts them as well
    return model


def _odd_loss(model: nn.Layer, step: int, rank: int, nranks: int) -> paddle.Tensor:
    """On this rank's share of the batch of all."""
    tokens = np.random.default_rng([SEED, step]).integers(0, VOCABULARY, [ROWS, 5])
    share = paddle.to_tensor(tokens[rank * ROWS // nranks : (rank + 1) * ROWS // nranks])
    return F.cross_entropy(model(share[:, :-1], step), share[:, 1:])


def _noisy_loss(model: nn.Layer, step: int, rank: int, nranks: int) -> paddle.Tensor:
    """Also draws from the generators of Python and NumPy."""
    return _odd_loss(model, step, rank, nranks) * (1.0 + 0.1 * random.random() + 0.1 * float(np.random.rand()))


def _named_loss(name: str) -> Callable[[nn.Layer, int, int, int], paddle.Tensor]:
    return lambda model, step, rank, nranks: loss_of(model, make_batch(name, step, rank))


def _overflowing_loss(model: nn.Layer, step: int, rank: int, nranks: int) -> paddle.Tensor:
    return loss_of(model, make_batch("mlp", step, rank)) * (float("inf") if step == 1 and rank == 0 else 1.0)


def _adamw(model: nn.Layer, **options: Any) -> Made:
    scheduler = CosineAnnealingDecay(0.02, 8)
    clip = nn.ClipGradByGlobalNorm(0.5)
    return Made(
        paddle.optimizer.AdamW(scheduler, parameters=model.parameters(), weight_decay=0.01, grad_clip=clip, **options),
        scheduler,
    )


def _grouped(model: nn.Layer) -> Made:
    """Two groups of parameters, one with a rate of its own; the largest second moment is kept."""
    params = model.parameters()
    groups = [{"params": params[:3], "learning_rate": 0.5}, {"params": params[3:]}]
    return Made(paddle.optimizer.AdamW(0.02, parameters=groups, amsgrad=True))


def _momentum(model: nn.Layer) -> Made:
    scheduler = StepDecay(0.05, step_size=2, gamma=0.5)
    return Made(paddle.optimizer.Momentum(scheduler, parameters=model.parameters(), use_nesterov=True), scheduler)


def _sgd(model: nn.Layer) -> Made:
    scheduler = CosineAnnealingDecay(0.1, 8)
    return Made(paddle.optimizer.SGD(scheduler, parameters=model.parameters()), scheduler)


def _constant(name: str, rate: float, **options: Any) -> Callable[[nn.Layer], Made]:
    return lambda model: Made(getattr(paddle.optimizer, name)(rate, parameters=model.parameters(), **options))


def _scaled(model: nn.Layer) -> Made:
    scaler = make_scaler(init_loss_scaling=1024.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1)
    scaler._scale = scaler._scale.reshape([1])  # as its load_state_dict expects
    return Made(paddle.optimizer.AdamW(0.02, parameters=model.parameters()), None, scaler)


OPTIMIZERS: dict[str, Callable[[nn.Layer], Made]] = {
    "Adagrad": _constant("Adagrad", 0.05),
    "Adadelta": _constant("Adadelta", 1.0),
    "Adam": _constant("Adam", 0.01, amsgrad=True),
    "Adamax": _constant("Adamax", 0.01),
    "ASGD": _constant("ASGD", 0.05, batch_num=2),
    "NAdam": _constant("NAdam", 0.01),
    "RAdam": _constant("RAdam", 0.01),
    "RMSProp": _constant("RMSProp", 0.01, momentum=0.9, centered=True),
    "Rprop": _constant("Rprop", 0.01, learning_rate_range=(1e-4, 0.1)),
}
"""Those that no other kind has."""
KINDS: dict[str, Kind] = {
    **{f"odd, {name}": Kind(_odd, make, _odd_loss) for name, make in OPTIMIZERS.items()},
    "odd": Kind(_odd, _adamw, _odd_loss),
    "odd, dropout": Kind(lambda: _odd(dropout=0.3), _grouped, _noisy_loss),
    "odd, momentum": Kind(_odd, _momentum, _odd_loss),
    "odd, sgd": Kind(_odd, _sgd, _odd_loss),
    "odd, constant": Kind(_odd, _constant("SGD", 0.1), _odd_loss),
    "odd, bfloat16": Kind(lambda: _odd(dtype="bfloat16"), lambda model: _adamw(model, multi_precision=True), _odd_loss),
    "odd, float64": Kind(lambda: _odd(dtype="float64"), _adamw, _odd_loss),
    "gpt": Kind(lambda: make_model("gpt"), _adamw, _named_loss("gpt")),
    "conv": Kind(lambda: make_model("conv"), _constant("Momentum", 0.05), _named_loss("conv")),
    "mlp, scaler": Kind(lambda: make_model("mlp"), _scaled, _overflowing_loss),
}
"""By name: "odd" ones see a share of one batch, so that any number of ranks trains alike."""
