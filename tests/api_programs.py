"""Draws programs for ``api_machine``: any order of calls that is allowed, over any settings."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.api_machine import BACKWARDS, N_LAYERS, PLACES, Command, Program

MAX_COMMANDS = 40
LAYERS = st.integers(0, N_LAYERS - 1)


class Drawing:
    """What is allowed next.

    Args:
        draw: of hypothesis.
        sums: whether a step may add up several backwards, which both sides do not round alike.
        reads_freely: whether parameters may be read where they are, after a step.
    """

    def __init__(self, draw: st.DrawFn, *, sums: bool, reads_freely: bool) -> None:
        self._draw = draw
        self._sums = sums
        self._reads_freely = reads_freely
        self._number = 1
        self._n_backwards = 0
        self._was_edited = False
        self._is_clean = False
        self._is_kept = {"save": False, "keep": False}
        self._frozen: set[int] = set()
        self.commands: list[Command] = []
        # Everything has a gradient and state at first: what becomes of a parameter without is not the question here.
        self._backward()
        self._put("step")
        self._clear(True)

    def next(self) -> None:
        """Draws one more command."""
        name = self._draw(st.sampled_from(self._allowed()))
        getattr(self, f"_{name}")()

    def _allowed(self) -> list[str]:
        allowed = ["evaluate", "read", "write", "rate", "fail", "fail"]
        may_add = self._n_backwards == 0 or (self._sums and not self._was_edited)
        allowed += ["batch"] * 6 + ["backward"] * 2 if may_add else []
        allowed += ["no_sync"] if may_add and self._sums else []
        allowed += ["look"] if self._reads_freely else []
        if self._n_backwards:
            allowed += ["step", "step", "clear_any", "full_grad", "norm", "edit"]
        if self._is_clean:
            allowed += ["freeze", "save", "keep"]
            allowed += ["load"] if self._is_kept["save"] else []
            allowed += ["restore"] if self._is_kept["keep"] else []
        return allowed

    def _put(self, name: str, **arguments: Any) -> None:
        self.commands.append((name, arguments))

    def _next_number(self) -> int:
        self._number += 2
        return self._number

    def _batch(self) -> None:
        self._backward()
        self._step()
        self._clear(self._draw(st.booleans()))

    def _backward(self) -> None:
        kinds = BACKWARDS if self._sums else BACKWARDS[:1]
        self._put("backward", number=self._next_number(), kind=self._draw(st.sampled_from(kinds)))
        self._n_backwards += 1
        self._is_clean = False

    def _no_sync(self) -> None:
        numbers = [self._next_number() for _ in range(self._draw(st.integers(1, 2)))]
        self._put("no_sync", numbers=numbers, nested=self._draw(st.booleans()))
        self._n_backwards += 1
        self._is_clean = False

    def _step(self) -> None:
        self._put("step")

    def _clear_any(self) -> None:
        self._clear(self._draw(st.booleans()))

    def _clear(self, set_to_zero: bool) -> None:
        self._put("clear", set_to_zero=set_to_zero)
        self._n_backwards = 0
        self._was_edited = False
        self._is_clean = True

    def _evaluate(self) -> None:
        self._put("evaluate", number=self._next_number())

    def _read(self) -> None:
        self._put("read")

    def _look(self) -> None:
        self._put("look", layer=self._draw(LAYERS))

    def _write(self) -> None:
        self._put("write", layer=self._draw(LAYERS), factor=self._draw(st.sampled_from([0.5, 1.25])))

    def _rate(self) -> None:
        self._put("rate", rate=self._draw(st.sampled_from([0.01, 0.02])))

    def _freeze(self) -> None:
        """Or thaws. One layer at least trains, and what is frozen has no gradient that a later step would use."""
        layer = self._draw(LAYERS)
        if layer not in self._frozen and len(self._frozen) == N_LAYERS - 1:
            return
        self._frozen ^= {layer}
        self._clear(False)
        self._put("freeze", layer=layer, frozen=layer in self._frozen)

    def _fail(self) -> None:
        """Paddle counts a gradient that has come in as zero after ``clear_grad(True)``; so nothing of it is left."""
        place = self._draw(st.sampled_from(PLACES))
        number = self._next_number()
        reached = {"backward of layers.0": 0, "hook after a gradient of layers.1": 1}
        if reached.get(place) in self._frozen:
            place = "after model"
        self._put("fail", place=place, number=number, waits=self._draw(st.booleans()), set_to_zero=False)
        self._n_backwards = 0
        self._was_edited = False
        self._is_clean = True

    def _full_grad(self) -> None:
        self._put("full_grad", layer=self._draw(LAYERS))

    def _norm(self) -> None:
        self._put("norm")

    def _edit(self) -> None:
        """By a value that is set. Clipping rounds by a norm, which is formed in another order over shards."""
        if self._sums and self._draw(st.booleans()):
            self._put("clip", bound=self._draw(st.sampled_from([0.01, 100.0])))
        else:
            layers = [layer for layer in range(N_LAYERS) if layer not in self._frozen]
            self._put("set_full_grad", layer=self._draw(st.sampled_from(layers)), value=0.125)
        self._was_edited = True

    def _save(self) -> None:
        self._put("save")
        self._is_kept["save"] = True

    def _load(self) -> None:
        self._put("load")
        self._clear(False)

    def _keep(self) -> None:
        self._put("keep")
        self._is_kept["keep"] = True

    def _restore(self) -> None:
        self._put("restore")


SETTINGS = st.fixed_dictionaries(
    {
        "stage": st.sampled_from([1, 2, 3]),
        "allgather_overlap": st.booleans(),
        "reduce_overlap": st.booleans(),
        "comm_fusion": st.sampled_from([True, True, False]),
        "comm_buffer_size_MB": st.sampled_from([25, 0.002, 0.0006]),
        "reshard_after_step": st.sampled_from([None, None, True]),
        "prefetch_depth": st.sampled_from([None, 0, 2]),
    }
)


@st.composite
def programs(draw: st.DrawFn, *, nranks: int, given_ones: dict[str, Any]) -> Program:
    """A program for so many ranks, with these settings and drawn ones."""
    settings = {**draw(SETTINGS), **given_ones}
    sums = draw(st.booleans())
    reads_freely = settings["stage"] < 3 and not settings["reshard_after_step"]
    drawing = Drawing(draw, sums=sums, reads_freely=reads_freely)
    for _ in range(draw(st.integers(5, MAX_COMMANDS))):
        drawing.next()
    exact = not sums and nranks <= 2
    # AdamW magnifies the order of a sum; SGD's kernel rounds in another way where what it updates has 8n elements.
    optimizer = draw(st.sampled_from(["Momentum", "AdamW"])) if exact else "Momentum"
    return Program(optimizer, settings, drawing.commands, exact)
