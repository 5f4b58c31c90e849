"""Programs that use the hook and FSDP without MPI."""

from pathlib import Path

from tests.torch.cases.programs import alone, program, said
from tests.torch.harness import mpiexec


def test_hook_and_fsdp_over_gloo_do_not_need_mpi(tmp_path: Path) -> None:
    """Ranks that torch's own store brings together; nothing of mpi4py is imported."""
    done = mpiexec(
        2,
        *program(f"""
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        rank = int(os.environ["PMI_RANK"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=40))
        for codec in ("int8", "topk:ratio=0.1", "powersgd:rank=2", "none"):
            ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
            ddp.register_comm_hook(hct.HookState(codec, module=ddp), hct.comm_hook)
            ddp(torch.ones(2, 300)).sum().backward()
        sharded = fully_shard(torch.nn.Linear(300, 300))
        hct.compress_fsdp(sharded, "int8")
        sharded(torch.ones(2, 300)).sum().backward()
        assert {{row.op for row in hct.stats()}} == {{"all_reduce", "all_gather", "reduce_scatter"}}
        say("mpi4py" in sys.modules)
        """),
    )
    assert said(done) == ["False", "False"], done.stderr


def test_importing_does_not_initialise_mpi() -> None:
    done = alone("""
        from torch.nn.parallel import DistributedDataParallel
        assert "mpi4py.MPI" not in sys.modules and "mpi4py" not in sys.modules
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        net = torch.nn.Linear(4, 4)
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(hct.HookState("hybrid", module=ddp), hct.comm_hook)
        ddp(torch.ones(2, 4)).sum().backward()
        assert net.weight.grad.unique().tolist() == [2.0]
        assert [r.op for r in hct.stats()] == ["all_reduce"]
        assert "mpi4py" not in sys.modules
        say("well")
    """)
    assert done.returncode == 0, done.stderr
    assert "well" in done.stdout
