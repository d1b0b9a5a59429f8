"""What one process gets: plain training with the sharded optimizer's methods, so that scripts run unchanged."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import paddle

from .comm import allocated_bytes, create_communicators, current_device
from .config import ShardingConfig
from .gradients import LocalGrad, check_finite_norm, check_gradient, check_norm_type
from .nonfinite import Finding, describe, non_finite_error, not_raised
from .numerics import count_nonfinite, sum_of_squares
from .recorded import PlainSubject
from .sharded_weights import UpdatedPart, model_weights, optimizer_weights
from .states import set_plain_state
from .timeline import Timeline
from .updates import optimizer_params

LOG = logging.getLogger("hp_sharding")


class PlainOptimizer:
    """Passes everything to the user's optimizer: with one rank there is nothing to shard and nothing to send.

    Numbers are those of unwrapped Paddle, bit for bit, whatever its clipping does.

    Attributes:
        timeline: step times; communication and exposed time are zero.
        param2bucket: empty: there are no buckets.
        config: the settings, of which only ``check_nan_inf`` matters.
        steps: how many ``step()`` have been made; a checkpoint keeps it.

    Args:
        names: structured name of each parameter by its ``id``; Paddle's own stands for what is not there.
        model: held weakly.
    """

    def __init__(
        self,
        inner: paddle.optimizer.Optimizer,
        config: ShardingConfig,
        baseline_bytes: int,
        *,
        names: Mapping[int, str] | None = None,
        model: paddle.nn.Layer | None = None,
    ) -> None:
        self._inner = inner
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._names = dict(names or {})
        self._baseline_bytes = baseline_bytes
        self.config = config
        marks = create_communicators([paddle.distributed.get_rank()], ["marks"])["marks"]
        self.timeline = Timeline(config.timeline, on_device=current_device().has_streams, new_mark=marks.mark)
        self.timeline.subject = PlainSubject(self, self.timeline)
        if config.timeline:
            self.timeline.subject.begin()
        self.param2bucket: dict[str, list[Any]] = {}
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def _inner_opt(self) -> Any:
        """The optimizer inside, where callers of Paddle's wrappers look for it."""
        return self._inner

    def step(self) -> None:
        """The inner optimizer's ``step()``.

        Raises:
            StateError: gradients are not finite, with ``check_nan_inf="raise"``; nothing has changed.
        """
        if self.timeline.enabled:
            self.timeline.enter("update", self.timeline.subject.whole)
        self._check_finite()
        self._inner.step()
        self.steps += 1
        self.timeline.end_step(self.steps)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """The inner optimizer's ``clear_grad()``; ``set_to_zero`` has Paddle's meaning."""
        self._inner.clear_grad(set_to_zero)

    clear_gradients = clear_grad

    def minimize(self, loss: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's ``minimize()``."""
        if self.timeline.enabled:
            self.timeline.enter("update", self.timeline.subject.whole)
        self._check_finite()
        result = self._inner.minimize(loss, *args, **kwargs)
        self.steps += 1
        self.timeline.end_step(self.steps)
        return result

    @contextlib.contextmanager
    def no_sync(self, *, replicate_only: bool = False) -> Iterator[None]:
        """Does nothing: gradients always add up locally."""
        yield

    def full_grad(self, param: paddle.Tensor) -> paddle.Tensor | None:
        """A copy of ``param.grad``, of the parameter's shape and dtype; None where it has had none."""
        return None if param.grad is None else param.grad.clone()

    def set_full_grad(self, param: paddle.Tensor, value: Any) -> None:
        """Sets ``param.grad`` to a copy of ``value``, of the parameter's shape, in the parameter's dtype."""
        param.grad = check_gradient(param, value).astype(param.dtype)

    @paddle.no_grad()
    def local_grads(self) -> list[LocalGrad]:
        """All gradients, whole and flat, to be edited in place; see ``ShardedOptimizer.local_grads``."""
        return [
            LocalGrad(self._name(param), param, param.grad.reshape([-1]), 0)
            for param in optimizer_params(self._inner)
            if param.grad is not None
        ]

    @paddle.no_grad()
    def grad_norm(self) -> float:
        """The global 2-norm of all gradients, whatever ``need_clip`` says; 0.0 without any."""
        gradients = [grad.gradient for grad in self.local_grads()]
        dtype = "float64" if any(gradient.dtype == paddle.float64 for gradient in gradients) else "float32"
        return float(paddle.sqrt(sum_of_squares(gradients, dtype)))

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> paddle.Tensor:
        """``paddle.nn.utils.clip_grad_norm_`` of the optimizer's parameters; returns the norm before clipping.

        Raises:
            ConfigError: another ``norm_type`` than 2.0.
            StateError: the norm is not finite and ``error_if_nonfinite``, or as for ``step()``.
        """
        check_norm_type(norm_type)
        if error_if_nonfinite:
            check_finite_norm(paddle.to_tensor(self.grad_norm()))
        return paddle.nn.utils.clip_grad_norm_(optimizer_params(self._inner), max_norm)

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave, of this optimizer or of plain Paddle's, whatever it has done since.

        A parameter that had not been updated yet when the state was saved begins anew.

        Raises:
            ConfigError: the state is that of one rank of a sharded optimizer, its keys belong to no parameter of this
                process, or a tensor is missing, or is of another size or kind of dtype. Nothing has changed.
        """
        set_plain_state(self._inner, state_dict)

    load_state_dict = set_state_dict

    def sharded_state_dict(self, model_sharded_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Moments and masters for ``flex_checkpoint``; see ``ShardedOptimizer.sharded_state_dict``."""
        parts = {param.name: UpdatedPart(param, None) for param in optimizer_params(self._inner)}
        return optimizer_weights(self._inner, parts, self._inner._master_weights, model_sharded_state_dict)

    def model_sharded_state_dict(self) -> dict[str, Any]:
        """``model.sharded_state_dict()``; see ``ShardedOptimizer.model_sharded_state_dict``."""
        return model_weights(self._model(), [])

    def _name(self, param: paddle.Tensor) -> str:
        return self._names.get(id(param), param.name)

    @paddle.no_grad()
    def _check_finite(self) -> None:
        """``check_nan_inf``; a step that a loss scaler has found fault with is left to it."""
        if self.config.check_nan_inf == "off" or self._inner._get_auxiliary_var("found_inf"):
            return
        counts = [(grad.name, int(count_nonfinite(grad.gradient))) for grad in self.local_grads()]
        found = [Finding("", name, count) for name, count in counts if count]
        if found and self.config.check_nan_inf == "raise":
            raise non_finite_error(0, describe(found))
        if found:
            LOG.warning("%s", not_raised(describe(found)))

    def _set_all_gather_overlap_forward(self, enabled: bool, layers: paddle.nn.Layer | None = None) -> None:
        """Does nothing: there is no gather."""

    def memory_report(self) -> dict[str, int]:
        """Model-state bytes, measured and by formula; see ``ShardedOptimizer.memory_report``.

        Parameters and moments are whole, and so are gradients of what trains; nothing has a shard.
        """
        params = optimizer_params(self._inner)
        trained = [param for param in params if not param.stop_gradient]
        state = {
            "parameters_bytes": _bytes(params),
            "gradients_bytes": _bytes(trained),
            "moments_bytes": sum(_bytes(tensors.values()) for tensors in self._inner._accumulators.values()),
        }
        return {
            "measured_bytes": allocated_bytes() - self._baseline_bytes,
            "formula_bytes": sum(state.values()),
            **state,
        }


def _bytes(tensors: Any) -> int:
    return sum(tensor.size * tensor.element_size() for tensor in tensors)
