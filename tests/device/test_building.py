"""The stand-in device is built once, and where it cannot be the reason is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import standin
from tests.device.standin import building


def test_another_paddle_or_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_paddle_version", lambda: "3.2.0")
    assert "3.2.0 is installed" in str(standin.why_missing())
    monkeypatch.setattr(building, "_paddle_version", lambda: None)
    assert "none is installed" in str(standin.why_missing())
    monkeypatch.setattr(building, "_paddle_version", lambda: standin.PADDLE_VERSION)
    monkeypatch.setattr(building, "_COMPILER", "no-such-compiler")
    assert "no-such-compiler" in str(standin.why_missing())
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        standin.built()


@pytest.mark.usefixtures("standin_device")
def test_it_is_built_once_and_again_when_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def compile_nothing(library: Path) -> None:
        made.append(library)
        library.write_bytes(b"")

    monkeypatch.setattr(building, "_compile", compile_nothing)
    first = standin.built(tmp_path)
    assert (standin.built(tmp_path), len(made)) == (first, 1)
    assert [path.name for path in first.iterdir()] == [building.LIBRARY]
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "other.cc").write_text("int other;")
    monkeypatch.setattr(building, "SOURCES", sources)
    assert standin.built(tmp_path) != first
    assert len(made) == 2
    assert {path.name for path in tmp_path.iterdir()} == {first.name, "src", standin.built(tmp_path).name}


@pytest.mark.usefixtures("standin_device")
def test_what_the_compiler_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.cc").write_text("this is no C++;")
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    with pytest.raises(RuntimeError, match=r"wrong\.cc:1.*error"):
        standin.built(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.cc"]
