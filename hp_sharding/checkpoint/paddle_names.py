"""Names that Paddle gives to what its optimizers keep, and which parameter such a name belongs to.

An accumulator's variable is called ``<parameter.name>_<accumulator>_<number>``, such as ``linear_0.w_0_moment1_0``.
With a float32 master, the master's name, ``<parameter.name>_fp32_master_<number>``, takes the place of the
parameter's. An optimizer that was made with ``name=`` has that before the accumulator's. The numbers are there to make
variables of one process differ; they count from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

ACCUMULATORS = (
    *("moment", "moment1", "moment2", "moment2_max", "velocity", "inf_norm"),
    *("beta1_pow_acc", "beta2_pow_acc", "beta1_pow", "beta2_pow", "momentum_decay_pow", "mu_product", "rho"),
    *("momentum", "mean_square", "mean_grad", "_avg_squared_grad", "_avg_squared_update"),
    *("prevs", "learning_rates", "d", "y", "m"),
)
"""Those of Paddle's own optimizers, by the names under which they keep them."""

_NUMBER = re.compile(r"_\d+$")
_MASTER = re.compile(r"^fp32_master_\d+_")


def master_variable(param_name: str) -> str:
    """The variable of a parameter's float32 master, in a process that has made no other."""
    return f"{param_name}_fp32_master_0"


def accumulator_variable(param_name: str, accumulator: str, *, has_master: bool, optimizer_name: str = "") -> str:
    """The variable of an accumulator, in a process that has made no other of it."""
    owner = master_variable(param_name) if has_master else param_name
    return "_".join([owner, *([optimizer_name] if optimizer_name else []), accumulator, "0"])


def owner_of(variable: str, owners: Mapping[str, str]) -> tuple[str, str] | None:
    """Whose accumulator a variable is, and which; None where nobody's.

    Args:
        variable: such as ``linear_0.w_0_moment1_0``.
        owners: names of parameters and of masters -> what to call them. The longest that fits is taken.
    """
    numbered = _NUMBER.search(variable)
    if numbered is None:
        return None
    end = numbered.start()
    while (end := variable.rfind("_", 0, end)) > 0:
        if variable[:end] in owners:
            return owners[variable[:end]], _MASTER.sub("", variable[end + 1 : numbered.start()])
    return None


def without_optimizer_name(accumulators: Iterable[str]) -> dict[str, str]:
    """Each accumulator as found -> without the name of the optimizer, if all of one optimizer's begin with the same."""
    found = list(dict.fromkeys(accumulators))
    plain = {name: _known_end(name) for name in found}
    prefixes = {name.removesuffix(plain[name]) for name in found}
    return plain if len(prefixes) == 1 else {name: name for name in found}


def _known_end(accumulator: str) -> str:
    """The longest known accumulator that it ends with."""
    if accumulator in ACCUMULATORS:
        return accumulator
    ends = [known for known in ACCUMULATORS if accumulator.endswith(f"_{known}")]
    return max(ends, key=len, default=accumulator)
