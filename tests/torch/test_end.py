"""Check how processes and their groups end, and what becomes of work in flight."""

from tests.torch.cases.programs import program, said
from tests.torch.harness import mpiexec


def test_exit_without_destroying_the_group() -> None:
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp")
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        dist.barrier()
        say("well")
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["well"] * 2


def test_work_in_flight_at_exit_ends() -> None:
    done = mpiexec(
        2,
        *program("""
        import atexit, time
        atexit.register(lambda: say(work.is_completed()))  # before the engine's own: runs after it
        dist.init_process_group("hybridcomp")
        if dist.get_rank() == 1:
            time.sleep(0.5)
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 2


def test_work_that_does_not_end_before_exit_keeps_its_buffers() -> None:
    done = mpiexec(
        2,
        *program("""
        import atexit, gc, time, weakref
        import numpy as np
        from mpi4py import MPI
        from hybridcomp.collectives.execution import progress as engine

        def after_the_engine():
            engine.engine().active.clear()
            gc.collect()
            say(buffer() is not None)

        comm = hybridcomp.Communicator(MPI.COMM_WORLD)
        out = np.empty(1000, np.float32)
        buffer = weakref.ref(out)
        if comm.rank == 0:
            atexit.register(after_the_engine)
            engine._EXIT_SECONDS = 0.1
        else:
            time.sleep(1)
        comm.Iallreduce(np.ones(1000, np.float32), out)
        del out
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]


def test_a_thread_that_mpi_keeps_does_not_crash_the_exit() -> None:
    done = mpiexec(
        2,
        *program("""
        import time
        from mpi4py import MPI
        from hybridcomp.collectives.agreement import making
        from hybridcomp.collectives.failure import blocked

        blocked._EXIT_SECONDS = making.LEAST_SECONDS = 0.2
        if MPI.COMM_WORLD.rank == 1:
            making._Assembly._assemble = lambda *_: time.sleep(60)
            making.LEAST_SECONDS = 60
        try:
            hybridcomp.Communicator(MPI.COMM_WORLD, axis="dp", timeout=2)
        except hybridcomp.CollectiveTimeoutError as error:
            say(error)
        """),
    )
    assert done.returncode == 1, done.stderr
    assert "duplicating it did not end within the timeout of 2 s" in done.stdout
    assert "rank 0 is still in MPI at its exit (making a communicator on axis 'dp', " in done.stderr


def test_destroying_a_group_with_work_in_flight() -> None:
    done = mpiexec(
        2,
        *program("""
        hct.set_policy("int8")
        dist.init_process_group("cpu:hybridcomp")
        t = torch.ones(3_000_000)
        dist.all_reduce(t, async_op=True)
        other = dist.new_group()
        dist.all_reduce(t.clone(), group=other, async_op=True)
        dist.destroy_process_group(other)
        dist.destroy_process_group()
        say(t.min().item() == 2)
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 2


def test_what_hooks_keep_ends_with_the_group() -> None:
    done = mpiexec(
        2,
        *program("""
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from hybridcomp.collectives.execution.progress import engine
        hct.set_policy("int8")
        for _ in range(3):
            dist.init_process_group("hybridcomp")
            ddp = nn.parallel.DistributedDataParallel(nn.Linear(100, 100))
            ddp.register_comm_hook(hct.HookState(axis="default"), hct.comm_hook)
            sharded = fully_shard(nn.Linear(100, 100))
            hct.compress_fsdp(sharded, axis="default")
            for net in (ddp, sharded):
                net(torch.ones(3, 100)).sum().backward()
            listening = len(engine()._listening)
            dist.destroy_process_group()
            say(f"{listening} {len(engine()._listening)}")
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 0"] * 6


def test_an_exception_ends_all_ranks() -> None:
    done = mpiexec(
        3,
        *program("""
        dist.init_process_group("hybridcomp")
        if dist.get_rank() == 1:
            raise ValueError("rank 1 has had enough")
        dist.barrier()
        """),
        timeout=40,
    )
    assert done.returncode != 0
    assert "ValueError: rank 1 has had enough" in done.stderr


def test_late_operation_times_out_in_wait_and_in_the_future() -> None:
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp", timeout=timedelta(seconds=20))
        group = dist.new_group()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5), group)
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            future = work.get_future()
            try:
                work.wait(timedelta(seconds=0.2))
            except hybridcomp.CollectiveTimeoutError as error:
                say("early")
            try:
                work.wait()
            except hybridcomp.CollectiveTimeoutError as error:
                say("all_reduce" in str(error))
            try:
                future.wait()
            except Exception as error:
                say("CollectiveTimeoutError" in str(error) or isinstance(error, TimeoutError))
            say(type(work.exception()).__name__)
            say(f"completed={work.is_completed()},success={work.is_success()}")
        dist.barrier()
        os._exit(0)
        """),
    )
    ended = "completed=True,success=False"
    assert said(done) == ["early", "True", "True", "CollectiveTimeoutError", ended], done.stderr


def test_hook_over_gloo_reports_an_error_of_its_group() -> None:
    done = mpiexec(
        2,
        *program("""
        from mpi4py import MPI
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
        state = hct.HookState("int8", module=ddp)
        ddp.register_comm_hook(state, hct.comm_hook)
        ddp(torch.ones(2, 300)).sum().backward()
        def broken(*args, **kwargs):
            raise ConnectionError("the link is down")
        state._operations.comm._group.start = broken
        try:
            ddp(torch.ones(2, 300)).sum().backward()
        except RuntimeError as error:
            say("the link is down" in str(error))
        MPI.COMM_WORLD.Barrier()  # the group may be in any state
        os._exit(0)
        """),
        HYBRIDCOMP_HOSTS="2x1",  # so that the group carries what they send
    )
    assert said(done) == ["True", "True"], done.stderr
