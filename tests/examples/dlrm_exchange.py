"""Exchange rows as examples/dlrm.py does, and check what arrives: ``mpiexec -n 3 python dlrm_exchange.py``."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
import torch.distributed as dist

import hybridcomp.torch as hct

BOUND = 0.02


def main() -> None:
    program = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "dlrm.py"))
    tables_of, group_of, count = program["Tables"], program["group_of"], program["TABLES"]
    hct.set_policy("none")
    dist.init_process_group("hybridcomp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    clicks = program["Clicks"](3, 400)
    tables = tables_of(clicks, 8, 3, torch.float32, group_of("emb_grad"))
    with torch.no_grad():
        for t, own in zip(tables.own, tables.tables, strict=True):
            own.weight[1] = float("nan") if t == 2 else 1e9
    specs = [f"bounded:abs={BOUND},coder={c}" for c in ("lz,vector=8", "huffman")]
    made = [group_of("emb", spec, 4) for spec in specs]
    tables.groups = [
        made[t < 3] for t in range(count)
    ]  # where there are four ranks, one has tables of one alone
    _, ids, _ = clicks.draw(1, rank, 64)
    ids[5:9] = 1
    weights = torch.randn(64, count, 8, generator=torch.Generator().manual_seed(rank))

    def passed(exact: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        tables.zero_grad()
        rows = tables(ids, exact=exact)
        (torch.nan_to_num(rows) * weights).sum().backward()
        return rows.detach(), [own.weight.grad.to_dense() for own in tables.tables]

    exact, wanted = passed(True)
    assert exact[:, 2].isnan().any()
    state = hct.state_dict()
    errors = []
    for _ in range(5):
        rows, grads = passed(False)
        assert torch.equal(rows.isnan(), exact.isnan())
        errors.append((rows - exact).nan_to_num().abs().max().item())
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
        hct.advance_step()
    hct.load_state_dict(state)
    again = (passed(False)[0] - exact).nan_to_num().abs().max().item()
    bounds = [f * BOUND for f in (2, 1.75, 1.5, 1.25, 1)]
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), errors
    if ranks > 1:
        assert errors[0] > 1.5 * BOUND
        assert errors[-1] > 0.5 * BOUND
    assert again == errors[0]

    bound = [plan.bound for plan in tables.plan(ids, [0.5, 0.2, 0.001], None)]
    every = [None] * ranks
    dist.all_gather_object(every, bound)
    assert every == [bound] * ranks
    dist.destroy_process_group()
    if rank == 0:
        print("rows arrived", flush=True)


main()
