"""What is done with a module of torch's when it is imported; states that cannot be resharded. Needs no ranks."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import hybridcomp.torch as hct
from hybridcomp.plugin.on_import import when_imported


def test_a_module_is_changed_when_it_comes_or_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "comes_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    before = list(sys.meta_path)
    when_imported("comes_later", lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module("comes_later")
    assert seen == [1]
    assert sys.meta_path == before
    when_imported("comes_later", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]
    del sys.modules["comes_later"]


def test_phases_have_two_names() -> None:
    with pytest.raises(ValueError, match="'forward' or 'backward', not 'sideways'"), hct.in_phase("sideways"):
        pass


def test_states_of_nobody_or_of_something_else() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        hct.reshard_state([], 2)
    with pytest.raises(ValueError, match="hook:dp/shape/x"):
        hct.reshard_state([{"hook:dp/shape/x": torch.zeros(1)}], 2)


def test_steps_and_factors_are_everybodys() -> None:
    old = [
        {
            "hook:dp/step": torch.tensor(7),
            "hook:dp/factor/w": torch.ones(3),
            "fsdp:fsdp/ranks/": torch.tensor(2),
        },
        {
            "hook:dp/step": torch.tensor(7),
            "hook:dp/factor/w": torch.ones(3),
            "fsdp:fsdp/reference/": torch.ones(2),
        },
    ]
    new = hct.reshard_state(old, 3)
    assert len(new) == 3
    for state in new:
        assert state["hook:dp/step"] == 7
        assert torch.equal(state["hook:dp/factor/w"], torch.ones(3))
        assert state["fsdp:fsdp/ranks/"] == 0
        assert "fsdp:fsdp/reference/" not in state
