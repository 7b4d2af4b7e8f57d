"""With the C++ wheel's files beside our packages, import refuses with one sentence."""

from pathlib import Path

import pytest

import mooncake
from mooncake.installed_once import _how_to_choose, refuse_if_cpp_installed


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


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ('{"dir_info": {}, "url": "file:///src/my%20clone"}', "'/src/my clone'"),
        ('{"dir_info": {"editable": true}, "url": "file:///src/clone"}', "--editable /src/clone"),
        ('{"archive_info": {}, "url": "https://example.org/mooncake_py.whl"}', "mooncake-py"),
        (None, "mooncake-py"),
    ],
)
def test_tells_where_to_install_from(origin: str | None, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package need not be on an index: the command must work with what the user has."""

    class Installed:
        def read_text(self, name: str) -> str | None:
            return origin if name == "direct_url.json" else None

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    assert f"--no-deps {source}`; to use the C++" in _how_to_choose("store.so")


def test_other_libraries_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_fast_copy.so").touch()
    (tmp_path / "store").mkdir()
    monkeypatch.setattr(mooncake, "__path__", [str(tmp_path), str(tmp_path / "absent")])
    refuse_if_cpp_installed()
