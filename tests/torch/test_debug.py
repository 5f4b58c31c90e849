"""Programs that do wrong are told so: ranks that differ under DETAIL, a group in a forked process, torchrun."""

from tests.torch.cases.programs import program
from tests.torch.harness import mpiexec


def test_detail_tells_every_rank_what_differs() -> None:
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp")
        me = dist.get_rank()
        def told(run, *words):
            try:
                run()
            except hybridcomp.MismatchError as error:
                say(all(word in str(error) for word in words) or error)
        told(lambda: dist.all_reduce(torch.ones(3)) if me else dist.broadcast(torch.ones(3), 0),
             "all_reduce, codec none, count 3, dtype float32", "broadcast, codec none", "rank 0", "rank 1")
        group = dist.new_group()
        told(lambda: dist.all_reduce(torch.ones(3 + me), group=group), "count 3,", "count 4,")
        group = dist.new_group()
        told(lambda: dist.all_reduce(torch.ones(3), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[me], group=group),
             "reduction sum", "reduction max")
        group = dist.new_group()
        told(lambda: dist.broadcast(torch.ones(3), me, group=group), "root 0", "root 1")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
        say("well")
        """),
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
        HYBRIDCOMP_POLICY="none",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["True"] * 8 + ["well"] * 2, done.stdout


def test_a_group_in_a_forked_process_is_an_error() -> None:
    done = mpiexec(
        2,
        *program("""
        dist.init_process_group("hybridcomp")
        dist.barrier()
        child = os.fork()
        if not child:
            for use in (lambda: dist.all_reduce(torch.ones(3)), dist.barrier, dist.monitored_barrier):
                try:
                    use()
                except hybridcomp.ConfigError as error:
                    say("forked" in str(error) and str(os.getpid()) in str(error))
            try:
                dist.new_group([dist.get_rank()], use_local_synchronization=True)
            except hybridcomp.ConfigError as error:
                say("forked" in str(error))
            dist.destroy_process_group()  # does nothing to the parent's
            os._exit(0)
        os.waitpid(child, 0)
        t = torch.ones(3)
        dist.all_reduce(t)
        say(t.tolist() == [2, 2, 2])
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 10, done.stdout + done.stderr
