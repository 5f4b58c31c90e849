"""1-bit Adam's rule in float64 on all ranks' data in one process, as its paper has it, and what is trained by it."""

import math
from collections.abc import Callable

import torch
from torch import nn

from hybridcomp.schedules.shards import Shards

WORDS, WIDTH, LATE = 60, 40, 10
CHUNK_BYTES = 1 << 20  # longer than any share of a parameter here


class Net(nn.Module):
    """A table of words, the last :data:`LATE` of which come late, two layers, one frozen, and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.fixed = nn.Linear(2 * WIDTH, 2 * WIDTH).requires_grad_(False)
        self.down = nn.Linear(2 * WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.to(dtype)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.fixed(torch.tanh(self.up(self.table(words)))))) * self.scale


def words_of(step: int, rank: int, late: int, n: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's words and targets of a step; the late words come after step ``late``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    known = WORDS if step >= late else WORDS - LATE
    words = torch.randint(known, (n,), generator=generator)
    return words, torch.randn(n, 3, generator=generator, dtype=torch.float64)


def loss_of(net: nn.Module, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error."""
    out = net(words)
    return ((out - target.to(out.dtype)) ** 2).mean()


def signs(x: torch.Tensor) -> torch.Tensor:
    """Return what scaled signs stand for."""
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype) * x.abs().mean()


class TwoWay:
    """The mean of the ranks' arrays: each rank owns a share, sums what others send of it, and sends the mean to all."""

    def __init__(self, n: int, ranks: int) -> None:
        self.there = torch.zeros(ranks, n, dtype=torch.float64)
        self.back = torch.zeros(n, dtype=torch.float64)
        shards = Shards.of(n, ranks, 8, CHUNK_BYTES)
        self.shares = [
            slice(min(q * shards.length, n), min((q + 1) * shards.length, n)) for q in range(ranks)
        ]

    def mean(self, arrays: list[torch.Tensor]) -> torch.Tensor:
        ranks, out = len(arrays), torch.empty_like(arrays[0])
        for owner, share in enumerate(self.shares):
            if share.start == share.stop:
                continue
            total = arrays[owner][share].clone()
            for rank in range(ranks):
                if rank != owner:
                    corrected = arrays[rank][share] + self.there[rank, share]
                    sent = signs(corrected)
                    self.there[rank, share] = corrected - sent
                    total += sent
            corrected = (total + self.back[share]) / ranks
            out[share] = signs(corrected)
            self.back[share] = (corrected - out[share]) * ranks
        return out


class Reference:
    """1-bit Adam, or 0/1 Adam, on ``ranks`` ranks; parameters whose names ``exact`` has are exchanged as they are.

    ``renewed`` tells whether a step, from 0, takes gradients. Elements without variance after such a step go on as in
    Adam.
    """

    def __init__(
        self,
        ranks: int,
        renewed: Callable[[int], bool],
        exact: set[str] | None,
        groups: list[dict],
        floor: float,
    ) -> None:
        self.net, self.ranks, self.renewed, self.exact, self.floor = Net(), ranks, renewed, exact, floor
        self.trained = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        self.of = {name: group for group in groups for name in group["names"]}
        self.m = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        self.ways = {name: TwoWay(p.numel(), ranks) for name, p in self.trained.items()}
        self.renews: dict[str, torch.Tensor] = {}
        self.step = self.renewals = 0

    def gradients(self, late: int) -> list[dict[str, torch.Tensor]]:
        found = []
        for rank in range(self.ranks):
            self.net.zero_grad()
            loss_of(self.net, *words_of(self.step, rank, late)).backward()
            found.append({name: p.grad.clone() for name, p in self.trained.items()})
        return found

    @torch.no_grad()
    def take(self, gradients: list[dict[str, torch.Tensor]]) -> None:
        """Step by the ranks' gradients."""
        self.renewals += self.renewed(self.step)
        for name, p in self.trained.items():
            group, m, v = self.of[name], self.m[name], self.v[name]
            before = m.clone()
            b1, b2 = group["betas"]
            decay = group.get("weight_decay", 0.0)
            own = [g[name] + (0 if group.get("decoupled") else decay) * p for g in gradients]
            mean = sum(own) / self.ranks
            adams = b1 * m + (1 - b1) * mean
            if self.renewed(self.step):
                m.copy_(adams)
                v.mul_(b2).add_((1 - b2) * mean * mean)
            else:
                renews = self.renews[name]
                local = [torch.where(renews, 0.0, b1 * m + (1 - b1) * g).flatten() for g in own]
                exact = self.exact is None or name in self.exact or self.ranks == 1
                new = (sum(local) / self.ranks if exact else self.ways[name].mean(local)).view_as(p)
                m.copy_(torch.where(renews, adams, new))
                v.copy_(torch.where(renews, b2 * v + (1 - b2) * mean * mean, v))
            self.move(name, p, before)
        self.step += 1
        if self.renewed(self.step - 1) and not self.renewed(self.step):
            self.renews = {name: v <= self.floor * v.mean() for name, v in self.v.items()}

    def corrected(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return momentum and deviation."""
        b1, b2 = self.of[name]["betas"]
        second = torch.full_like(self.v[name], 1 - b2**self.renewals)
        if name in self.renews:
            second[self.renews[name]] = 1 - b2 ** (self.step + 1)
        deviation = (self.v[name] / second).sqrt() + self.of[name]["eps"]
        return self.m[name] / (1 - b1 ** (self.step + 1)), deviation

    def move(self, name: str, p: torch.Tensor, before: torch.Tensor) -> None:
        """Move a parameter, whose momentum was ``before``."""
        group = self.of[name]
        m, deviation = self.corrected(name)
        if group.get("decoupled"):
            p.mul_(1 - group["lr"] * group.get("weight_decay", 0.0))
        p.sub_(group["lr"] * m / deviation)


class AloneReference(Reference):
    """0/1 Adam whose ranks step by themselves: ``alone`` tells whether a step, from 0, exchanges nothing.

    ``own`` are the parameters of each rank.
    """

    def __init__(self, alone: Callable[[int], bool], *args) -> None:
        super().__init__(*args)
        self.alone, self.apart = alone, False
        self.own = [{name: p.detach().clone() for name, p in self.trained.items()} for _ in range(self.ranks)]
        self.mine: list[dict[str, torch.Tensor]] = []
        self.total: list[dict[str, torch.Tensor]] = []
        self.weight: dict[str, float] = {}
        self.kept: dict[str, float] = {}

    def gradients(self, late: int) -> list[dict[str, torch.Tensor]]:
        found, start = [], {name: p.detach().clone() for name, p in self.trained.items()}
        for rank in range(self.ranks):
            self.show(self.own[rank])
            self.net.zero_grad()
            loss_of(self.net, *words_of(self.step, rank, late)).backward()
            found.append({name: p.grad.clone() for name, p in self.trained.items()})
        self.show(start)
        return found

    @torch.no_grad()
    def show(self, values: dict[str, torch.Tensor]) -> None:
        """Put values in the network, whose own are those of the last exchange."""
        for name, p in self.trained.items():
            p.copy_(values[name])

    @torch.no_grad()
    def take(self, gradients: list[dict[str, torch.Tensor]]) -> None:
        alone = self.alone(self.step)
        if not alone and not self.apart:
            super().take(gradients)
        else:
            if not self.apart:
                self.mine = [{name: m.clone() for name, m in self.m.items()} for _ in range(self.ranks)]
                self.total = [
                    {name: torch.zeros_like(m) for name, m in self.m.items()} for _ in range(self.ranks)
                ]
                self.weight, self.kept = dict.fromkeys(self.m, 0.0), dict.fromkeys(self.m, 1.0)
            for name in self.trained:
                self.take_apart(name, [g[name] for g in gradients], alone)
            self.step += 1
        self.apart = alone
        if not alone:
            self.own = [
                {name: p.detach().clone() for name, p in self.trained.items()} for _ in range(self.ranks)
            ]

    def take_apart(self, name: str, gradients: list[torch.Tensor], alone: bool) -> None:
        """Step by each rank's own gradients, and exchange what has come together unless ``alone``."""
        group, renews = self.of[name], self.renews[name]
        b1, b2 = group["betas"]
        decay, decoupled = group.get("weight_decay", 0.0), group.get("decoupled")
        keep = 1 - group["lr"] * decay if decoupled else 1.0
        share = group["lr"] / (1 - b1 ** (self.step + 1))
        own = [g + (0 if decoupled else decay) * x[name] for g, x in zip(gradients, self.own, strict=True)]
        self.weight[name] = keep * self.weight[name] + share
        self.kept[name] *= keep
        for rank, g in enumerate(own):
            m = b1 * self.mine[rank][name] + (1 - b1) * g
            self.total[rank][name] = torch.where(renews, 0.0, keep * self.total[rank][name] + share * m)
            if alone:
                _, deviation = self.corrected(name)
                x = self.own[rank][name]
                x.copy_(torch.where(renews, x, keep * x - share * m / deviation))
                self.mine[rank][name] = torch.where(renews, self.m[name], m)
        if alone:
            return
        mean = sum(own) / self.ranks
        local = [(total[name] / self.weight[name]).flatten() for total in self.total]
        exact = self.exact is None or name in self.exact or self.ranks == 1
        new = (sum(local) / self.ranks if exact else self.ways[name].mean(local)).view_as(mean)
        self.m[name] = torch.where(renews, b1 * self.m[name] + (1 - b1) * mean, new)
        self.v[name] = torch.where(renews, b2 * self.v[name] + (1 - b2) * mean * mean, self.v[name])
        _, deviation = self.corrected(name)
        p, weight = self.trained[name], torch.full_like(mean, self.weight[name])
        weight[renews] = share
        p.mul_(self.kept[name]).sub_(weight * self.m[name] / deviation)


class LambReference(Reference):
    """1-bit LAMB, with the limits that it has by default, but for the one on changes of the factor."""

    NEAR = 1e-3

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.kept = dict.fromkeys(self.trained, 0.0)
        self.factors = dict.fromkeys(self.trained, 1.0)
        self.fresh: dict[str, torch.Tensor] = {}

    def move(self, name: str, p: torch.Tensor, before: torch.Tensor) -> None:
        group, (b1, b2) = self.of[name], self.of[name]["betas"]
        m, deviation = self.corrected(name)
        update = m / deviation + group.get("weight_decay", 0.0) * p
        if self.renewed(self.step):
            scale = 1.0
            if p.norm() > 0 and update.norm() > 0:
                scale = min(max(float(p.norm() / update.norm()), 0.01), 10.0)
                self.kept[name] = 0.9 * self.kept[name] + 0.1 * scale
            self.fresh[name] = self.v[name].clone()
        else:
            gradient = (self.m[name] - b1 * before) / (1 - b1)
            self.fresh[name] = b2 * self.fresh[name] + (1 - b2) * gradient**2
            now = (self.fresh[name] / (1 - b2 ** (self.step + 1))).sqrt() + group["eps"]
            largest = min(max(float((deviation / now).max()), 0.5), 4.0)
            last = self.factors[name]
            self.factors[name] = min(max(largest, last * (1 - self.NEAR)), last * (1 + self.NEAR))
            scale = self.factors[name] * self.kept[name]
        p.sub_(group["lr"] * scale * update)


def most_apart(net: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference of two models' parameters."""
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    found = max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)
    return math.inf if math.isnan(found) else found
