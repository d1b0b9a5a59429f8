"""Waits and orders of the lanes on a device, and what they keep alive: ``hp_sharding/comm``."""

from __future__ import annotations

from tests.mutation.breaks import Break, played

_STREAM = "tests/device/test_stream.py::test_"
_TIMELINE = "tests/device/test_timeline.py::test_"
_HOST_IS_FREE = f"{_STREAM}the_host_waits_for_nothing_that_it_starts[2]"
_COMPUTE_GOES_ON = f"{_STREAM}compute_goes_on_beside_a_reduction_and_the_one_that_follows_it[2]"
_ON_HOST = f"{_STREAM}where_only_the_host_can_wait_it_does_and_what_lies_on_the_host_is_refused[2]"
_ORDER = f"{_STREAM}a_collective_comes_after_what_was_computed_and_read_before_it[2]"
_TOUCHED_BY_2 = f"{_STREAM}what_a_collective_touches_lives_until_it_is_over[2]"
_CONVERSIONS = "tests/device/test_stream_conversions.py::test_"
_CONVERTED_BY_2 = f"{_CONVERSIONS}what_a_conversion_touches_lives_until_it_is_over[2]"
_GROWS_BY_2 = f"{_CONVERSIONS}memory_of_a_lane_that_grows_leaves_what_is_under_way_alone[2]"
_GROWS_BY_3 = f"{_CONVERSIONS}memory_of_a_lane_that_grows_leaves_what_is_under_way_alone[3]"
_GOES = f"{_STREAM}memory_goes_when_its_own_stream_has_waited_or_it_is_seen_done[2]"
_KEEP = "tests/device/test_keep_alive.py::test_"
_ENDS = "tests/device/test_stream_ends.py::test_"
_CLOSED = f"{_KEEP}all_lanes_are_closed_when_what_is_under_way_on_them_has_ended"
_LATE_PEER = f"{_ENDS}a_collective_that_a_peer_does_not_start_fails_in_time_and_its_process_ends"
_CONTRACT = "tests/device/test_contract.py::test_contract"
_CONTRACT_OF_1 = f"{_CONTRACT}[1-LocalCommunicator]"
_CONTRACT_OF_2 = f"{_CONTRACT}[2-StreamCommunicator]"
_FAILED = f"{_KEEP}a_collective_that_has_failed_keeps_its_memory"

ORDERS = [
    Break(
        "comm/stream.py",
        "who waits for a collective does not",
        "            stream.wait_event(self._ended)",
        "            pass",
        (played("stage 2"),),
    ),
    Break(
        "comm/stream.py",
        "a lane does not wait for what was queued before",
        "        stream.wait_event(self._origin)\n",
        "",
        (_ORDER,),
    ),
    Break(
        "comm/stream.py",
        "a lane waits for an event that stands for nothing",
        "        self._origin.record(home)\n",
        "",
        (_ORDER,),
    ),
    Break(
        "comm/stream.py",
        "a collective runs on the stream that computes",
        "                with CurrentStream(self._device, self._stream, home):",
        "                if True:",
        (_HOST_IS_FREE,),
    ),
    Break(
        "comm/device.py",
        "no other stream becomes the current one",
        "        _set_stream(self._device, self._stream)",
        "        pass",
        (_HOST_IS_FREE,),
    ),
    Break(
        "comm/device.py",
        "the stream of a lane stays the current one",
        "        _set_stream(self._device, self._home)",
        "        pass",
        (_COMPUTE_GOES_ON,),
    ),
    Break(
        "comm/stream.py",
        "a lane does not wait for the work that it follows",
        "        try:\n            after.wait()",
        "        try:\n            pass",
        (_COMPUTE_GOES_ON,),
    ),
    Break(
        "comm/stream.py",
        "compute waits for the work that a lane follows",
        """                with CurrentStream(self._device, self._stream, home):
                    self._queue(work, run if nbytes else None, after)
""",
        """                if after is not None and after.on_device and not self._follow(after, work):
                    return work
                with CurrentStream(self._device, self._stream, home):
                    self._queue(work, run if nbytes else None, None)
""",
        (_HOST_IS_FREE,),
    ),
    Break(
        "comm/stream.py",
        "nobody waits for the work of a host that a lane follows",
        "        if after is not None and not after.on_device and not self._follow(after, work):",
        "        if False:",
        (_ON_HOST,),
    ),
    Break(
        "comm/stream.py",
        "the end of a collective is not recorded",
        "        self._ended.record(lane)",
        "        pass",
        (played("stage 2"),),
    ),
    Break(
        "comm/stream.py",
        "the end is not recorded where a part was queued and then something failed",
        """                    self._queue(work, run if nbytes else None, after)
            finally:
                # Also where only a part of it was queued: that part uses its memory.
                work.mark_end(self._stream)
""",
        """                    self._queue(work, run if nbytes else None, after)
                work.mark_end(self._stream)
            finally:
""",
        (played("raised midway"),),
    ),
    Break(
        "comm/stream.py",
        "the begin of a collective is not recorded",
        "        self._begun.record(lane)",
        "        pass",
        (_CONTRACT_OF_2,),
    ),
    Break(
        "comm/stream.py",
        "a wait is timed and does not take place",
        "        try:\n            self.wait()",
        "        try:\n            pass",
        (played("timed"),),
    ),
    Break(
        "comm/stream_marks.py",
        "the begin of a stall is not recorded",
        "        self._before.record()\n",
        "",
        (played("stalls"),),
    ),
    Break(
        "comm/stream_marks.py",
        "the end of a stall is not recorded",
        "        after.record()\n",
        "",
        (played("stalls"),),
    ),
    Break(
        "comm/stream_marks.py",
        "a mark is not recorded",
        "        self._event.record()\n",
        "",
        (f"{_TIMELINE}a_mark_is_where_its_stream_is",),
    ),
    Break(
        "comm/stream_marks.py",
        "nobody looks at a mark",
        "            self._watcher.add(self)\n",
        "",
        (f"{_TIMELINE}a_mark_is_where_its_stream_is",),
    ),
    Break(
        "comm/stream.py",
        "nobody looks at a stall",
        "            self._watcher.add(stall)\n",
        "            pass\n",
        (played("stalls"),),
    ),
    Break(
        "comm/stream.py",
        "nobody looks at a collective",
        "            self._watcher.add(work)\n",
        "",
        (_GOES,),
    ),
    Break(
        "comm/stream.py",
        "a lane is closed over what is under way",
        "        while self._last is not None and not self._last.done():",
        "        while False:",
        (_CLOSED,),
    ),
    Break(
        "comm/stream.py",
        "a lane does not know what is under way when it is closed",
        "                self._last = work\n",
        "",
        (_CLOSED,),
    ),
    Break(
        "comm/stream_group.py",
        "lanes are not closed with their group",
        "            comm.close()\n",
        "            pass\n",
        (_CLOSED,),
    ),
    Break(
        "comm/stream_group.py",
        "the first collectives are read before they are there",
        "        work.wait()\n",
        "",
        (_CONTRACT_OF_2,),
    ),
    Break(
        "comm/stream_group.py",
        "destructors that wait for ever are waited for",
        "        signal.alarm(_DESTRUCTORS_S)",
        "        pass",
        (_LATE_PEER,),
    ),
    Break(
        "comm/local.py",
        "a copy does not wait for the one ahead of it",
        "                self._before.wait()",
        "                pass",
        (_CONTRACT_OF_1,),
    ),
    Break(
        "comm/local.py",
        "a copy does not wait for what it follows",
        "                self._after.wait()",
        "                pass",
        (_CONTRACT_OF_1,),
    ),
    Break(
        "comm/local.py",
        "whether a copy is done is not asked of what it follows",
        "        if all(work.done() for work in ahead):",
        "        if self.end_s is None:",
        (_CONTRACT_OF_1,),
    ),
    Break(
        "comm/local.py",
        "a copy that can be made is not when somebody asks",
        "                self.wait()\n",
        "                pass\n",
        (_CONTRACT_OF_1,),
    ),
    Break(
        "comm/local.py",
        "a copy passes those ahead of it",
        "        if after is None and not copy.adds and self._last is None:",
        "        if after is None and not copy.adds:",
        (_CONTRACT_OF_1,),
    ),
    Break(
        "comm/local.py",
        "nobody knows which copy is ahead",
        "        self._last = work\n",
        "",
        (_CONTRACT_OF_1,),
    ),
]

KEPT = [
    Break(
        "comm/stream.py",
        "nothing that a collective touches is kept",
        "                work.hold(touched)",
        "                pass",
        (played("dropped"),),
    ),
    Break(
        "comm/stream.py",
        "objects are kept, and not their memory",
        """            holder = core.DenseTensor()
            holder._share_data_with(tensor.get_tensor())
            self._held.append(holder)
""",
        "            self._held.append(tensor)\n",
        (_CONTRACT_OF_2,),
    ),
    Break(
        "comm/stream.py",
        "the output of a gather is not kept",
        '"all_gather", run, [output, input, gathered],',
        '"all_gather", run, [input, *([] if gathered is output else [gathered])],',
        (_TOUCHED_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "the input of a gather is not kept",
        '"all_gather", run, [output, input, gathered],',
        '"all_gather", run, [output, gathered],',
        (_TOUCHED_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "what a lane had for a gather before it needed more is not kept",
        '"all_gather", run, [output, input, gathered],',
        '"all_gather", run, [output, input],',
        (_GROWS_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "the output of a reduce-scatter is not kept",
        "            touched = [output, input, total]",
        "            touched = [input, *([] if total is output else [total])]",
        (_TOUCHED_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "the input of a reduce-scatter is not kept",
        "            touched = [output, input, total]",
        "            touched = [output, total]",
        (_TOUCHED_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "what a lane had for a reduce-scatter before it needed more is not kept",
        "            touched = [output, input, total]",
        "            touched = [output, input]",
        (_GROWS_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "the output of a sum of 16-bit terms is not kept",
        "            touched = [output, input, *terms]",
        "            touched = [input, *(term for term in terms if term is not output)]",
        (_CONVERTED_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "what is rounded for a sum is not kept",
        "            touched = [output, input, *terms]",
        "            touched = [output, *terms]",
        (_CONVERTED_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "what a lane had for a sum of 16-bit terms before it needed more is not kept",
        "            touched = [output, input, *terms]",
        "            touched = [output, input]",
        (_GROWS_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "what an all-reduce touches is not kept",
        "        touched = [tensor, sent, *(terms or [])]",
        "        touched = [] if sent is tensor else [tensor, sent, *(terms or [])]",
        (played("dropped"),),
    ),
    Break(
        "comm/stream.py",
        "what is rounded for an all-reduce is not kept",
        "        touched = [tensor, sent, *(terms or [])]",
        "        touched = [sent, *(terms or [])]",
        (_CONVERTED_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "what a lane had for an all-reduce before it needed more is not kept",
        "        touched = [tensor, sent, *(terms or [])]",
        "        touched = [tensor]",
        (_GROWS_BY_2,),
    ),
    Break(
        "comm/stream.py",
        "what a lane had for the exchange of an all-reduce before it needed more is not kept",
        "        touched = [tensor, sent, *(terms or [])]",
        "        touched = [tensor, sent]",
        (_GROWS_BY_3,),
    ),
    Break(
        "comm/stream.py",
        "what a broadcast touches is not kept",
        '"broadcast", run, [tensor],',
        '"broadcast", run, [],',
        (played("dropped"),),
    ),
    Break(
        "comm/stream.py",
        "a work that nobody has any more is not kept by its lane",
        "                self._works.add(work)\n",
        "",
        (_GOES,),
    ),
    Break(
        "comm/stream.py",
        "memory goes when any stream has waited",
        "        if self._held and same_stream(stream, self._home):",
        "        if self._held:",
        (_GOES,),
    ),
    Break(
        "comm/device.py",
        "all streams are one",
        "    return bool(one.stream_base == other.stream_base)",
        "    return True",
        (_GOES,),
    ),
    Break(
        "comm/stream.py",
        "memory stays when its stream has waited",
        """            # Memory that is freed from now on goes to what this stream does after the collective.
            self._held = []
""",
        "            pass\n",
        (_GOES,),
    ),
    Break(
        "comm/stream.py",
        "memory stays when the collective is seen done",
        "        self.end_s = time.perf_counter()\n        self._held = []\n",
        "        self.end_s = time.perf_counter()\n",
        (_GOES,),
    ),
    Break(
        "comm/stream.py",
        "the event that a lane waits for goes at once",
        """        self._origin, self._begun, self._ended = (paddle.device.Event() for _ in range(3))
        self._origin.record(home)
        stream.wait_event(self._origin)
""",
        """        origin, self._begun, self._ended = (paddle.device.Event() for _ in range(3))
        origin.record(home)
        stream.wait_event(origin)
""",
        (played("standing still"),),
    ),
    Break(
        "comm/stream.py",
        "the event that a lane has waited for stays",
        "        self._origin = None\n        return True",
        "        return True",
        equivalent="The event goes with its work at the latest; it only goes sooner, by the time that somebody has it.",
    ),
    Break(
        "comm/stream.py",
        "the work that another one follows is not kept",
        "        self._after = after\n        self._origin",
        "        self._origin",
        equivalent="A work on a device is kept by its own lane and its watcher until it is seen done or has failed.",
    ),
    Break(
        "comm/watch.py",
        "what has failed is not kept",
        "            self._failed += self._works\n",
        "",
        (_FAILED,),
    ),
    Break(
        "comm/stream_group.py",
        "streams go on which something hangs",
        "            _abandoned.append(self)\n",
        "            pass\n",
        (_LATE_PEER,),
    ),
    Break(
        "comm/stream_group.py",
        "a group is not kept to the end of the process",
        "    _groups.append(group)",
        "    pass",
        (_CLOSED,),
    ),
    Break(
        "comm/local.py",
        "a copy keeps objects and not their memory",
        "        target, source = self._output._slice(0, numel), self._input._slice(0, numel)",
        "        target, source = self._output, self._input",
        (_CONTRACT_OF_1,),
    ),
]
