"""Changes to a module of another library when it is imported."""

import importlib
import sys
from pathlib import Path

import pytest

from hybridcomp.imports import when_imported


def test_a_module_is_changed_when_it_comes_or_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "comes_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    when_imported("comes_later", lambda module: seen.append(module.value))
    when_imported("comes_later", lambda module: seen.append(-module.value))
    finders = len(sys.meta_path)
    when_imported("never_comes", seen.append)
    assert seen == []
    assert len(sys.meta_path) == finders  # one finds all
    importlib.import_module("comes_later")
    assert seen == [1, -1]
    sys.modules["comes_later"].value = 0
    importlib.reload(sys.modules["comes_later"])
    assert seen == [1, -1]
    when_imported("comes_later", lambda module: seen.append(module.value + 1))
    assert seen == [1, -1, 2]
    del sys.modules["comes_later"]
