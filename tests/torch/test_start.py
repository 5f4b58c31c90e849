"""Check how processes find each other."""

import socket
import sys
from pathlib import Path

import pytest

from hybridcomp.launcher import reserve_port
from hybridcomp.net import Lab, LabError
from tests.torch.cases.programs import HEAD, alone, program, said
from tests.torch.harness import PATH, mpiexec
from tests.torch.test_torchrun import Started, written


@pytest.mark.parametrize("backend", ["hybridcomp", "gloo"])
def test_ranks_come_from_mpi(backend: str) -> None:
    done = mpiexec(
        3,
        *program(f"""
        assert "MASTER_ADDR" not in os.environ
        for _ in range(2):  # and once more in the same process
            dist.init_process_group("{backend}")
            t = torch.tensor([dist.get_rank()])
            dist.all_reduce(t)
            assert (dist.get_world_size(), t.item()) == (3, 3)
            dist.destroy_process_group()
        say("well")
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["well"] * 3


def test_one_process_without_mpiexec() -> None:
    done = alone("""
        dist.init_process_group("hybridcomp")
        t = torch.ones(3)
        dist.all_reduce(t, dist.ReduceOp.AVG)
        assert (dist.get_world_size(), t.tolist()) == (1, [1, 1, 1])
        dist.destroy_process_group()
        say("well")
    """)
    assert done.returncode == 0, done.stderr
    assert "well" in done.stdout


def test_an_mpi_that_torchrun_cannot_start() -> None:
    done = alone(
        """
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        MPI.Get_library_version = lambda: "Open MPI v5.0.8, package: ..."
        try:
            dist.init_process_group("hybridcomp", store=dist.HashStore(), rank=1, world_size=4)
        except hybridcomp.ConfigError as error:
            say(error)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "Open MPI v5.0.8, package: ..., cannot be started by torchrun" in done.stdout
    assert "mpiexec or srun of the MPI that mpi4py uses, or `pip install mpich`" in done.stdout
    assert done.stdout.count("\n") == 1


def test_different_policies_are_told_on_every_rank() -> None:
    done = mpiexec(
        2,
        *program("""
        hct.set_policy(["int8", "int4"][int(os.environ["PMI_RANK"])])
        try:
            dist.init_process_group("hybridcomp")
        except hybridcomp.MismatchError as error:
            say("int8" in str(error) and "int4" in str(error))
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_a_rank_that_does_not_come_is_named() -> None:
    done = mpiexec(
        3,
        *program("""
        dist.init_process_group("hybridcomp")
        if dist.get_rank() == 0:
            try:
                dist.new_group([0, 2], timeout=timedelta(seconds=1), use_local_synchronization=True)
            except hybridcomp.CollectiveTimeoutError as error:
                assert "rank 1 of 2" in str(error), error
                say("named")
        dist.barrier()
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["named"]


def test_store_at_a_given_port() -> None:
    with reserve_port() as reserved:
        done = mpiexec(
            2,
            *program("""
            for _ in range(2):
                dist.init_process_group("hybridcomp")
                dist.barrier()
                dist.destroy_process_group()
            say("well")
            """),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(reserved.getsockname()[1]),
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["well"] * 2


@pytest.mark.parametrize("backend", ["hybridcomp", "gloo"])
def test_a_port_that_is_in_use_is_an_error_on_every_rank_at_once(backend: str) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = mpiexec(3, *program(refused(backend, f"port {port}")), timeout=30, MASTER_PORT=str(port))
    assert sorted(said(done)) == ["ConfigError", "RemoteError", "RemoteError"], done.stderr


def test_a_port_that_is_none_is_refused_on_every_rank() -> None:
    done = mpiexec(2, *program(refused("hybridcomp", "'http'")), timeout=30, MASTER_PORT="http")
    assert sorted(said(done)) == ["ConfigError", "RemoteError"], done.stderr


def refused(backend: str, words: str) -> str:
    return f"""
    try:
        dist.init_process_group("{backend}")
    except hybridcomp.HybridcompError as error:
        assert "{words}" in str(error), error
        say(type(error).__name__)
    """


def test_environment_for_libraries_that_read_it() -> None:
    done = mpiexec(
        3,
        *program("""
        try:
            hct.export_environment()
        except hybridcomp.ConfigError as error:
            assert "init_process_group" in str(error)
        dist.init_process_group("hybridcomp")
        rank = str(dist.get_rank())
        hct.export_environment()
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (rank, rank)
        assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert os.environ["GROUP_RANK"] == "0"
        try:
            with socket.socket() as other:
                other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
                raise SystemExit("any program may take MASTER_PORT")
        except OSError as error:
            assert "in use" in str(error)
        dist.destroy_process_group()
        dist.init_process_group("gloo")  # by torch's own rendezvous
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t.item() == 3
        say("well")
        """),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["well"] * 3


@pytest.mark.long
@pytest.mark.lab
def test_hosts_that_share_a_name_and_nothing_else() -> None:
    """Every host of a lab has the machine's name, and a loopback of its own."""
    try:
        with Lab(2, "none", kind="namespaces") as lab:
            done = lab.mpirun(
                [
                    sys.executable,
                    *program("""
                    os.environ.pop("MASTER_ADDR", None)
                    for backend in ("hybridcomp", "gloo"):
                        dist.init_process_group(backend)
                        dist.barrier()
                        dist.destroy_process_group()
                    from hybridcomp.torch.backend.rendezvous import addresses
                    mine = addresses()[0]
                    dist.init_process_group("hybridcomp")
                    hct.export_environment()
                    dist.destroy_process_group()
                    dist.init_process_group("gloo")  # by torch's own rendezvous, at the address that was exported
                    dist.barrier()
                    place = [os.environ[name] for name in ("RANK", "GROUP_RANK", "LOCAL_RANK")]
                    say(f"well {socket.gethostname()} {mine} {''.join(place)}")
                    """),
                ],
                ppn=2,
                env={"PYTHONPATH": PATH},
                timeout=60,
            )
    except LabError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert [words[0] for words in said] == ["well"] * 4
    assert len({words[1] for words in said}) == 1
    assert len({words[2] for words in said}) == 2
    assert {words[3] for words in said} == {"000", "101", "210", "311"}


LACKS = {
    "isa": ("HYBRIDCOMP_ISA", "avx999"),
    "policy": ("HYBRIDCOMP_POLICY", "int9"),
    "trace": ("HYBRIDCOMP_TRACE", "/proc/nosuch"),
    "threads": ("HYBRIDCOMP_NUM_THREADS", "many"),
    "options": ("HYBRIDCOMP_TEST_MARK", ""),
}
LISTENS = r'''
def listens():
    """Return the addresses and ports at which this process listens, in the kernel's own form."""
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    own = {os.readlink(file) for file in files if os.path.islink(file)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add(words[1])
    return found
'''


@pytest.mark.parametrize("by", ["mpiexec", "torchrun"])
def test_ranks_of_one_machine_listen_on_the_loopback_alone(by: str, tmp_path: Path) -> None:
    """But for torch's own store where a launcher of torch's gives it a port."""
    body = f"""{LISTENS}
before = listens()  # what the launcher has left open
dist.init_process_group("hybridcomp")
dist.all_reduce(torch.ones(3))
dist.barrier()
port = int(os.environ.get("MASTER_PORT", "0"))
new = {{one for one in listens() - before if int(one.split(":")[1], 16) != port}}
assert new, "MPI listens"
assert all(one.split(":")[0] == "0100007F" for one in new), new
os.write(1, b"well\\n")
dist.destroy_process_group()
"""
    if by == "mpiexec":
        done = mpiexec(2, "-c", HEAD + body)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["well"] * 2
    else:
        for status, printed in Started().ranks(written(tmp_path, body), 2, LOCAL_WORLD_SIZE="2"):
            assert status == 0, printed


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_ranks_meet_at_an_address_of_ipv6(tmp_path: Path) -> None:
    body = """
dist.init_process_group("hybridcomp")
total = torch.ones(3)
dist.all_reduce(total)
os.write(1, f"{total.tolist()}\\n".encode())
dist.destroy_process_group()
"""
    for status, printed in Started().ranks(written(tmp_path, body), 2, MASTER_ADDR="::1"):
        assert (status, printed) == (0, "[2.0, 2.0, 2.0]\n")


@pytest.mark.parametrize("lack", ["isa", "policy", "trace", "threads", "options"])
@pytest.mark.parametrize("by", ["mpiexec", "torchrun"])
def test_what_one_rank_lacks_is_told_to_all(by: str, lack: str, tmp_path: Path) -> None:
    """In milliseconds, though the timeout is long, and before any rank waits inside MPI."""
    body = f"""
import time
one = int(os.environ.get("RANK", os.environ.get("PMI_RANK"))) == 1
if one:
    name, value = {LACKS[lack]}
    os.environ[name] = value
options = "wrong" if one and {lack == "options"} else None
began = time.monotonic()
try:
    dist.init_process_group("hybridcomp", timeout=timedelta(seconds=90), pg_options=options)
    os.write(1, b"made\\n")
except Exception as error:
    said = "rank 1 failed" in str(error), time.monotonic() - began < 20
    os.write(1, f"{{type(error).__name__}} {{said[0]}} {{said[1]}}\\n".encode())
if "PMI_RANK" in os.environ:
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()  # mpiexec ends both when one ends so
else:
    time.sleep(0.5)  # rank 0 has the store
os._exit(0)
"""
    if by == "mpiexec":
        texts = mpiexec(2, "-c", HEAD + body, timeout=60).stdout.split("=====")[0]
    else:
        texts = "".join(printed for _, printed in Started().ranks(written(tmp_path, "import os\n" + body), 2))
    kinds = {
        "options": "TypeError",
        "policy": "PolicyError",
    }
    assert sorted(line for line in texts.splitlines() if "Error" in line or "made" in line) == sorted(
        ["RemoteError True True", f"{kinds.get(lack, 'ConfigError')} False True"]
    ), texts
