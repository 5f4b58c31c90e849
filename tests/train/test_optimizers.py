"""The optimizers by their equations in NumPy, and what a checkpoint has of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.checkpoints.resume import Checkpoint, check_fits, run_identity
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.optimizer.optimizers import make_optimizer, moments, set_learning_rate
from hybridcomp_lab.train.reading import parse

SHAPES = {"w": (5, 7), "norm": (7,), "zeros": (3, 4)}
CONFIG = TrainConfig(weight_decay=0.1, beta1=0.8, beta2=0.95)
STEPS, CLOSE = 6, 1e-12


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s) * (n != "zeros") for n, s in SHAPES.items()}


def gradient(name: str, step: int) -> np.ndarray:
    """Return the gradient of a step; at one of them it is zero."""
    rng = np.random.default_rng([step, len(name)])
    return rng.standard_normal(SHAPES[name]) * 3.0**step * (step != 2)


def trained(config: TrainConfig) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = {n: torch.nn.Parameter(torch.from_numpy(x)) for n, x in start().items()}
    optimizer = make_optimizer(parameters, config)
    for step in range(STEPS):
        set_learning_rate(optimizer, 0.1 / (step + 1))
        for name, p in parameters.items():
            p.grad = torch.from_numpy(gradient(name, step))
        optimizer.step()
    return parameters, optimizer


def check(config: TrainConfig, rule) -> None:
    parameters, _ = trained(config)
    for name, x in start().items():
        state: dict[str, np.ndarray | float] = {}
        for step in range(STEPS):
            decay = config.weight_decay if x.ndim == 2 else 0.0
            x = rule(x, gradient(name, step), step + 1, 0.1 / (step + 1), decay, state)  # noqa: PLW2901
        np.testing.assert_allclose(parameters[name].detach().numpy(), x, rtol=CLOSE, atol=CLOSE)
        assert np.abs(x - start()[name]).max() > 0.01


def lans(x, g, t, lr, decay, state):
    """Algorithm 2 of arXiv 2006.13484."""

    def norm(v):
        return np.sqrt(np.sum(v * v))

    def ratio(v):
        return norm(x) / norm(v) if norm(x) and norm(v) else 1.0

    b1, b2 = CONFIG.beta1, CONFIG.beta2
    g = g / norm(g) if norm(g) else g
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
    d = np.sqrt(state["v"] / (1 - b2**t)) + 1e-6
    r = state["m"] / (1 - b1**t) / d + decay * x
    c = g / d + decay * x
    return x - lr * (b1 * ratio(r) * r + (1 - b1) * ratio(c) * c)


def test_lans():
    check(dataclasses.replace(CONFIG, optimizer="lans"), lans)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum):
    def sgd(x, g, t, lr, decay, state):
        state["u"] = momentum * state.get("u", 0.0) + g
        return x - lr * (g + momentum * state["u"] + decay * x)

    check(dataclasses.replace(CONFIG, optimizer="sgd", momentum=momentum), sgd)


def test_lans_does_not_see_how_large_a_gradient_is():
    a, b = (trained(dataclasses.replace(CONFIG, optimizer="lans")) for _ in range(2))
    for name, p in a[0].items():
        p.grad, b[0][name].grad = (torch.from_numpy(by * gradient(name, 1)) for by in (1, 1e3))
    for _, optimizer in (a, b):
        optimizer.step()
    for name, p in a[0].items():
        torch.testing.assert_close(p, b[0][name], rtol=CLOSE, atol=CLOSE)


def test_a_tensor_without_a_gradient_stays():
    parameters, optimizer = trained(dataclasses.replace(CONFIG, optimizer="lans"))
    before = parameters["w"].detach().clone()
    for p in parameters.values():
        p.grad = None
    parameters["norm"].grad = torch.ones_like(parameters["norm"])
    optimizer.step()
    assert torch.equal(parameters["w"], before)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "names"),
    [
        ("adamw", 0.9, {"step", "exp_avg", "exp_avg_sq"}),
        ("lans", 0.9, {"step", "exp_avg", "exp_avg_sq"}),
        ("sgd", 0.9, {"momentum_buffer"}),
        ("sgd", 0.0, set()),
    ],
)
def test_moments_are_there_before_the_first_step_and_after_it(optimizer, momentum, names):
    config = dataclasses.replace(CONFIG, optimizer=optimizer, momentum=momentum)
    parameters = {n: torch.nn.Parameter(torch.from_numpy(x)) for n, x in start().items()}
    fresh = make_optimizer(parameters, config)
    assert moments(fresh, parameters["w"]).keys() == names
    old, used = trained(config)
    assert moments(used, old["w"]).keys() == names
    # Moments that were made for a checkpoint to be loaded are as none: the first step has the same bits.
    anew = {n: torch.nn.Parameter(torch.from_numpy(x)) for n, x in start().items()}
    other = make_optimizer(anew, config)
    for name, p in parameters.items():
        moments(fresh, p)
        p.grad, anew[name].grad = (torch.from_numpy(gradient(name, 1)) for _ in range(2))
    for one in (fresh, other):
        one.step()
    assert all(torch.equal(p, anew[name]) for name, p in parameters.items())


def test_another_optimizer_does_not_go_on(tmp_path):
    def made(identity):
        return Checkpoint(tmp_path, 4, 1.5, "digest", identity)

    adamw, lans_ = (run_identity(TrainConfig(optimizer=o), 256, "text") for o in ("adamw", "lans"))
    before = {name: value for name, value in adamw.items() if name != "optimizer"}
    check_fits(made(before), adamw, TrainConfig())  # a checkpoint of a version that had AdamW alone
    for there, here, said in (
        (before, lans_, "adamw there, lans here"),
        (lans_, adamw, "lans there, adamw here"),
    ):
        with pytest.raises(ConfigError, match=rf"another run \(optimizer {said}\)"):
            check_fits(made(there), here, TrainConfig())


def test_momentum_has_its_range():
    with pytest.raises(ConfigError, match="momentum must be at least 0 and below 1, not 1"):
        parse(["--momentum", "1"])
