"""Phases, and states that cannot be resharded. Needs no ranks."""

import pytest
import torch

import hybridcomp.torch as hct


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
