"""What one process gets: plain training with the sharded optimizer's methods, so that scripts run unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import paddle

from .comm import allocated_bytes
from .config import ShardingConfig
from .timeline import Timeline
from .updates import optimizer_params


class PlainOptimizer:
    """Passes everything to the user's optimizer: with one rank there is nothing to shard and nothing to send.

    Numbers are those of unwrapped Paddle, bit for bit, whatever its clipping does.

    Attributes:
        timeline: step times; communication and exposed time are zero.
        param2bucket: empty: there are no buckets.
        config: the settings, none of which matters.
    """

    def __init__(self, inner: paddle.optimizer.Optimizer, config: ShardingConfig, baseline_bytes: int) -> None:
        self._inner_opt = inner
        self._baseline_bytes = baseline_bytes
        self.config = config
        self.timeline = Timeline(config.timeline)
        self.param2bucket: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "_inner_opt":
            raise AttributeError(name)
        return getattr(self._inner_opt, name)

    def step(self) -> None:
        """The inner optimizer's ``step()``."""
        self._inner_opt.step()
        self.timeline.end_step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """The inner optimizer's ``clear_grad()``; ``set_to_zero`` has Paddle's meaning."""
        self._inner_opt.clear_grad(set_to_zero)

    clear_gradients = clear_grad

    def minimize(self, loss: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's ``minimize()``."""
        return self._inner_opt.minimize(loss, *args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: gradients always add up locally."""
        yield

    def full_grad(self, param: paddle.Tensor) -> paddle.Tensor | None:
        """A copy of ``param.grad``, of the parameter's shape and dtype; None where it has had none."""
        return None if param.grad is None else param.grad.clone()

    def _set_all_gather_overlap_forward(self, enabled: bool, layers: paddle.nn.Layer | None = None) -> None:
        """Does nothing: there is no gather."""

    def memory_report(self) -> dict[str, int]:
        """Model-state bytes, measured and by formula; see ``ShardedOptimizer.memory_report``.

        Parameters and moments are whole, and so are gradients of what trains; nothing has a shard.
        """
        params = optimizer_params(self._inner_opt)
        trained = [param for param in params if not param.stop_gradient]
        state = {
            "parameters_bytes": _bytes(params),
            "gradients_bytes": _bytes(trained),
            "moments_bytes": sum(_bytes(tensors.values()) for tensors in self._inner_opt._accumulators.values()),
        }
        return {
            "measured_bytes": allocated_bytes() - self._baseline_bytes,
            "formula_bytes": sum(state.values()),
            **state,
        }


def _bytes(tensors: Any) -> int:
    return sum(tensor.size * tensor.element_size() for tensor in tensors)
