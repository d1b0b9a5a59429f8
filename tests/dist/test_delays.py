"""Late collectives change no bit: a training with delays everywhere is the one without, also where one lane overtakes
another or a rank runs ahead. The long form is ``scripts/soak delays``.
"""

from __future__ import annotations

import pytest

from tests import harness
from tests.mutation.breaks import Break
from tests.soak import delays
from tests.soak.delays import FAKE, REAL, Course
from tests.soak.starts import Split

REAL_STEPS = 16
FAKE_STEPS = 16
ONE_BY_FOUR, TWO_BY_TWO = Split(1, 4), Split(2, 2)
# Which of ``delays.courses`` of a stage.
REAL_CASES = [
    (ONE_BY_FOUR, 1, 0),
    (TWO_BY_TWO, 2, 0),
    (ONE_BY_FOUR, 2, 1),
    (ONE_BY_FOUR, 3, 0),
    (TWO_BY_TWO, 3, 2),
]
FAKE_CASES = [(Split(replicas, 1), stage, index) for replicas in (1, 2) for stage in (1, 2, 3) for index in range(4)]


def _course(split: Split, stage: int, index: int, *, steps: int, lanes: str, seed: int = 0) -> Course:
    return delays.courses(stage, split, 4 * steps, seed=seed, lanes=lanes)[index]


def _id(value: object) -> str:
    return str(value) if isinstance(value, Split) else repr(value)


@pytest.mark.slow
@pytest.mark.parametrize(("split", "stage", "index"), REAL_CASES, ids=_id)
def test_delays_between_ranks_change_nothing(split: Split, stage: int, index: int) -> None:
    found = delays.run(_course(split, stage, index, steps=REAL_STEPS, lanes=REAL))
    assert min(each.n_collectives for each in found) > 5 * REAL_STEPS


@pytest.mark.parametrize(("split", "stage", "index"), FAKE_CASES, ids=_id)
def test_lanes_that_overtake_each_other_change_nothing(split: Split, stage: int, index: int) -> None:
    (found,) = delays.run(_course(split, stage, index, steps=FAKE_STEPS, lanes=FAKE))
    assert found.n_collectives > 5 * FAKE_STEPS


# -- what would be found ----------------------------------------------------------------------------------------------

BREAKS = {
    "a gather is not waited for": Break(
        "gathers.py",
        "a gather is taken for finished when somebody needs it",
        "        self._timeline.wait(work)\n        try:\n            buffer.finish_gather()\n",
        """        try:
            buffer._bind_params()
            buffer.status, buffer._work = Status.READY, None
""",
    ),
    "an all-reduce follows nothing": Break(
        "replication.py", "an all-reduce does not follow its sums", "after=self._last, wire", "after=None, wire"
    ),
    "a bucket is freed before its gather's end": Break(
        "residency.py",
        "memory of a unit that is let go of is given out again at once",
        "                self.finish(bucket)\n                if self.buffers[bucket].status is Status.READY:\n",
        """                buffer = self.buffers[bucket]
                if buffer.status is Status.SYNCING:
                    pool, address = buffer.place.pool, buffer.full.data_ptr()
                    pool._returned.extend(
                        lent.block for lent in list(pool._lent.values()) if lent.block.ctypes.data == address
                    )
                    buffer.status, buffer._work = Status.READY, None
                    self._under_way -= 1
                    buffer.free()
                elif buffer.status is Status.READY:
""",
    ),
    "gradient storage is used again too soon": Break(
        "in_flight.py",
        "storage of a gradient that is still reduced is given to the next one",
        """        while flights and flights[0].work.done():
            flight = flights.popleft()
            self._live_bytes -= flight.nbytes
            used = _left_by(flight)
""",
        """        while flights:
            flight = flights.popleft()
            self._live_bytes -= flight.nbytes
            used = flight.used
""",
    ),
}
# Where each shows: replicas, stage, and which of ``delays.courses``.
SHOWN_BY = {
    "a gather is not waited for": (1, 2, 0),
    "an all-reduce follows nothing": (2, 2, 0),
    "a bucket is freed before its gather's end": (1, 3, 0),
    "gradient storage is used again too soon": (1, 2, 0),
}


@pytest.mark.parametrize("name", BREAKS)
def test_lanes_that_overtake_each_other_show_what_is_broken(name: str) -> None:
    n_replicas, stage, index = SHOWN_BY[name]
    course = _course(Split(n_replicas, 1), stage, index, steps=FAKE_STEPS, lanes=FAKE)
    with pytest.raises(harness.RankFailure, match=r"DelayFault: .* seed 0: step \d+: "):
        delays.run(course._replace(broken=BREAKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_delays_between_ranks_show_what_is_broken(name: str) -> None:
    n_replicas, stage, index = SHOWN_BY[name]
    course = _course(Split(n_replicas, 4 // n_replicas), stage, index, steps=REAL_STEPS, lanes=REAL)
    with pytest.raises(harness.RankFailure, match=r"DelayFault: .* seed 0: step \d+: "):
        delays.run(course._replace(broken=BREAKS[name]))
