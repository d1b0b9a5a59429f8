"""The list of waits, divisions, checks and frees has all of the package; a few are taken out each time.

All of them: ``scripts/mutate --all --jobs 2``.
"""

from __future__ import annotations

import ast
import zlib
from pathlib import Path

import pytest

from tests.harness import REPO_ROOT
from tests.mutation import listing
from tests.mutation.listed import files_of, missing_and_stale
from tests.mutation.listing import Entry
from tests.mutation.serving import NO_SUCH_TEST, TOOK_TOO_LONG, server
from tests.mutation.sites import PACKAGE, Place, Site, all_places, modules, places
from tests.mutation.trying import choose_places, farm, find_among, try_listed

N_ROTATING = 10
MOST_OPEN = 1
"""Sites that no test is known to miss. This may become less; a new one wants a test, or a reason."""
SOURCE = '''
class Box:
    def __init__(self):
        self._full = None

    def free(self, work, left):
        """Waits / frees."""
        if not self._full:
            raise StateError(
                f"nothing is in it, {left / 2}"
            )
        work.wait()
        assert left is not None and isinstance(left, int)
        assert left > 0, left
        half = (left
                // 2)
        left /= 3
        self._full.scale_(1 / half)
        path = folder / "name"
        try:
            self._require("READY")
        except ValueError:
            raise
        except OSError as error:
            raise error
        if not work.wait_for(self.over, left):
            del left
        self._full = None
        self._full = None
        start = lambda: begin().wait()
        text = "".join([])
        return self.wait()


def abstract():
    raise NotImplementedError
    raise NotImplementedError("nothing")


close()
'''
EXPECTED = [
    ("Box.free", "check", 'raise StateError( f"nothing is in it, {left / 2}" )', 1, "pass"),
    ("Box.free", "wait", "work.wait()", 1, "pass"),
    ("Box.free", "check", "assert left > 0, left", 1, "pass"),
    ("Box.free", "division", "left // 2", 1, "(left)"),
    ("Box.free", "division", "left /= 3", 1, "pass"),
    ("Box.free", "division", "self._full.scale_(1 / half)", 1, "pass"),
    ("Box.free", "division", "1 / half", 1, "(1)"),
    ("Box.free", "check", 'self._require("READY")', 1, "pass"),
    ("Box.free", "wait", "work.wait_for(self.over, left)", 1, "work.wait_for(self.over, 0)"),
    ("Box.free", "free", "del left", 1, "pass"),
    ("Box.free", "free", "self._full = None", 1, "pass"),
    ("Box.free", "free", "self._full = None", 2, "pass"),
    ("Box.free", "wait", "begin().wait()", 1, "begin()"),
    ("<module>", "free", "close()", 1, "pass"),
]


def _found() -> list[Place]:
    return places(PACKAGE / "box.py", SOURCE)


def test_every_kind_of_site_is_found_and_nothing_else() -> None:
    found = [(each.site.function, *each.site[2:], each.mutant.after) for each in _found()]
    assert found == EXPECTED
    assert {each.site.module for each in _found()} == {"box.py"}


def test_what_is_taken_out_leaves_every_line_where_it_was() -> None:
    for each in _found():
        ast.parse(each.mutant.source)
        assert each.mutant.source.count("\n") == SOURCE.count("\n")
        lines, others = SOURCE.splitlines(), each.mutant.source.splitlines()
        differing = [n for n, (line, other) in enumerate(zip(lines, others, strict=True), 1) if line != other]
        assert set(differing) <= set(each.lines)
        assert each.mutant.line in differing


def test_a_list_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "FOLDER", tmp_path)
    tests = Entry(("tests/unit/test_a.py::test_b[c: d]", "tests/unit/test_a.py::test_e"))
    by_kind = {"wait": tests, "free": Entry(is_open=True)}
    entries = {each.site: by_kind.get(each.site.kind, Entry(equivalent="it is: so")) for each in _found()}
    listing.write("box.py", entries)
    assert listing.read() == entries
    assert list(listing.read()) == list(entries)
    listing.write("box.py", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "said"), [("f\n    wait: a\n    wait: a\n", "twice"), ("f\n  wait: a\n", "neither")])
def test_a_list_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setattr(listing, "FOLDER", tmp_path)
    (tmp_path / "box.txt").write_text(text)
    with pytest.raises(ValueError, match=said):
        listing.read()


def test_what_is_new_and_what_is_gone_is_named() -> None:
    found = _found()
    entries = {each.site: Entry() for each in found[1:]} | {Site("box.py", "gone", "wait", "x.wait()"): Entry()}
    missing = missing_and_stale(entries, found)
    assert missing == [
        f"not in the list: line {found[0].mutant.line} of {found[0].site}",
        "not in the sources any more: box.py, gone, wait: x.wait()",
    ]


def test_the_list_has_every_site_of_the_package_and_no_other() -> None:
    missing = missing_and_stale(listing.read(), all_places())
    assert missing == [], "scripts/mutate --find brings tests/mutation/lists up to date; see CONTRIBUTING.md"


def test_every_module_is_looked_at() -> None:
    assert len(modules()) > 100
    assert {each.site.module for each in all_places()} > {"buffer.py", "pool.py", "arena.py", "comm/tcp.py"}


def test_every_entry_has_tests_that_are_there_or_a_reason() -> None:
    sources: dict[str, str] = {}
    for site, entry in listing.read().items():
        assert bool(entry.tests) + bool(entry.equivalent) + entry.is_open == 1, f"{site}: tests, a reason, or open"
        for test in entry.tests:
            path, _, name = test.partition("::")
            if path not in sources:
                sources[path] = (REPO_ROOT / path).read_text()
            function = name.partition("[")[0].rpartition("::")[2]
            assert f"def {function}(" in sources[path], f"{site}: {test} is not there"


def test_no_more_sites_are_without_a_test_than_were() -> None:
    assert sum(entry.is_open for entry in listing.read().values()) <= MOST_OPEN


FACTS = PACKAGE / "facts.py"


@pytest.mark.slow
def test_a_server_tells_what_is_caught_hangs_or_does_nothing_and_leaves_its_copy_as_it_was() -> None:
    tests = ["tests/unit/test_facts.py::test_who_has_launched_less_is_named"]
    source = (REPO_ROOT / FACTS).read_text()
    with server(["tests/unit/test_facts.py"]) as on:
        on.wait_until_ready()
        # What runs only as the module is imported shows in a process of its own.
        harmless, broken = source + "\nTRIED = 1\n", source + "\nraise RuntimeError\n"
        stuck = source.replace("    return ", "    import time; time.sleep(60); return ")
        assert not on.run(tests, limit_s=60).caught
        assert not on.run(tests, limit_s=60, broken=(FACTS, harmless)).caught
        assert on.run(tests, limit_s=60, broken=(FACTS, broken)).caught
        answer = on.run(tests, limit_s=3, broken=(FACTS, stuck))
        assert (answer.code, answer.caught, answer.culprits) == (TOOK_TOO_LONG, True, tuple(tests))
        assert on.run(["tests/unit/test_facts.py::test_none"], limit_s=60).code == NO_SUCH_TEST
        assert (on.tree / FACTS).read_text() == source
        [place, *_] = [each for each in all_places() if each.site.module == "facts.py"]
        assert find_among(on, place, ["tests/unit/test_facts.py"]).caught


@pytest.mark.slow
def test_a_test_misses_what_was_taken_out() -> None:
    """Which ones changes with the sources; the message has what repeats it."""
    number = zlib.crc32(b"".join((REPO_ROOT / path).read_bytes() for path in modules()))
    entries = listing.read()
    tried = [
        place
        for place in all_places()
        if entries[place.site].tests and all(test.startswith("tests/unit/") for test in entries[place.site].tests)
    ]
    chosen = choose_places(tried, N_ROTATING, number)
    with farm(2, files_of(entries[place.site] for place in chosen)) as on:
        verdicts = try_listed(on, chosen, entries)
    survivors = [str(tried.place.site) for tried in verdicts if not tried.caught]
    assert survivors == [], f"scripts/mutate --all --jobs 2 {' '.join({str(each.site.path) for each in chosen})}"
