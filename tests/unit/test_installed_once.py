"""With the C++ wheel's files beside our packages, import refuses with one sentence."""

from pathlib import Path

import pytest

import mooncake
from mooncake.installed_once import refuse_if_cpp_installed


def test_alone() -> None:
    refuse_if_cpp_installed()


@pytest.mark.parametrize("library", ["store.so", "engine.so", "store.cpython-312-x86_64-linux-gnu.so"])
def test_beside_the_cpp_wheel(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / library).touch()
    monkeypatch.setattr(mooncake, "__path__", [*mooncake.__path__, str(tmp_path)])
    with pytest.raises(ImportError) as caught:
        refuse_if_cpp_installed()
    text = str(caught.value)
    assert "\n" not in text
    for part in (library, "pip uninstall -y mooncake-transfer-engine", "pip uninstall -y mooncake-py", "--no-deps"):
        assert part in text


def test_other_libraries_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_fast_copy.so").touch()
    (tmp_path / "store").mkdir()
    monkeypatch.setattr(mooncake, "__path__", [str(tmp_path), str(tmp_path / "absent")])
    refuse_if_cpp_installed()
