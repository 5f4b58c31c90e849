"""Files are written whole or not at all, and whatever a file holds is read or refused in one line that names it."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import random
import re
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridcomp import trace
from hybridcomp.breakdown import reading
from hybridcomp.cli.main import EXIT_WRONG_INPUT, main
from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.files import Log, checked, tell_failure, write_text, writing
from hybridcomp.perfmodel import load_profile
from hybridcomp.perfmodel.profile import BUILT_IN
from hybridcomp.policy import load_policy
from hybridcomp.policy.adapt.decisions import read_decisions
from hybridcomp.policy.at_exit import FilesAtExit
from hybridcomp.results.record import read_run
from hybridcomp_lab.planner.site import read_site
from hybridcomp_lab.study.reading import read_study
from hybridcomp_lab.train.checkpoints.resume import RECORD, Checkpoint, read_checkpoint
from hybridcomp_lab.train.reading import read_toml
from hybridcomp_lab.train.shares import read_shares
from tests.breakdown.making import two_ranks
from tests.packages import modules

ROOT = Path(__file__).parents[1]
SECRET = "the only copy"


# -- writing ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(room: int = 4096) -> Iterator[None]:
    """Have files refuse to grow past so many bytes: EFBIG, where a disk says ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_there_once_it_is_whole(tmp_path):
    path = tmp_path / "new folder" / "file"
    with writing(path, durable=True) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert names(path.parent) == {"file"}


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt(), ValueError("x")])
def test_what_is_half_done_is_removed_and_an_earlier_file_stays(tmp_path, failure):
    path = tmp_path / "file"
    path.write_text(SECRET)

    def fail() -> None:
        with writing(path) as file:
            file.write(b"half")
            raise failure

    with pytest.raises(ConfigError if isinstance(failure, OSError) else type(failure)):
        fail()
    assert path.read_text() == SECRET
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize("size", [5000, 1 << 20])  # written at closing, and before
def test_on_a_full_disk_an_earlier_file_stays(tmp_path, size):
    path = tmp_path / "file"
    path.write_text(SECRET)
    with full_disk(), pytest.raises(ConfigError, match=f"cannot write {path}: File too large"):
        write_text(path, size * "x")
    assert path.read_text() == SECRET
    assert names(tmp_path) == {"file"}


def test_links_are_replaced_and_not_followed(tmp_path):
    secret, path = tmp_path / "secret", tmp_path / "file"
    secret.write_text(SECRET)
    path.symlink_to(secret)
    write_text(path, "new")
    assert (secret.read_text(), path.read_text(), path.is_symlink()) == (SECRET, "new", False)


def test_a_file_keeps_its_permissions_and_a_new_one_has_the_usual_ones(tmp_path):
    private, new = tmp_path / "private", tmp_path / "new"
    private.touch(0o600)
    before = os.umask(0o027)
    try:
        for path in (private, new):
            write_text(path, "x")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (private, new)] == [0o600, 0o640]


def test_names_as_long_as_they_may_be(tmp_path):
    write_text(tmp_path / (255 * "n"), "x")
    with pytest.raises(ConfigError, match="File name too long"):
        write_text(tmp_path / (256 * "n"), "x")


def test_devices_and_pipes_are_written_to_as_they_are(tmp_path):
    write_text("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="cannot write"):
        write_text(pipe, "x")  # nobody reads: it does not wait for somebody
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    while reader.is_alive():
        with contextlib.suppress(ConfigError):
            write_text(pipe, "x")
        reader.join(0.01)
    assert set(got[0]) == {"x"}
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_not_written_to(tmp_path):
    with pytest.raises(ConfigError, match="it is a folder"):
        write_text(tmp_path, "x")


def test_a_log_grows_by_whole_lines(tmp_path):
    secret, path = tmp_path / "secret", tmp_path / "log"
    secret.write_text(SECRET)
    path.symlink_to(secret)
    with Log(path, b"kept\n") as log:
        log.append("one\n")
        with full_disk(), pytest.raises(ConfigError, match=f"cannot write {path}"):
            log.append(5000 * "x" + "\n")
        log.append("two\n")
    assert (path.read_text(), secret.read_text()) == ("kept\none\ntwo\n", SECRET)


def test_a_report_follows_no_link(tmp_path, capsys):
    secret, run = tmp_path / "secret", tmp_path / "run"
    secret.write_text(SECRET)
    two_ranks(run)
    for name in ("trace.partial", "trace.json", "report.html", "report.html.partial"):
        (run / name).symlink_to(secret)
    assert main(["report", str(run)]) == 0
    assert secret.read_text() == SECRET
    assert json.loads((run / "trace.json").read_text())["traceEvents"]


def test_on_a_full_disk_an_earlier_report_stays(tmp_path, capsys):
    two_ranks(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(1 << 16):  # room for the trace, and not for the page
        assert main(["report", str(tmp_path)]) == EXIT_WRONG_INPUT
    assert (
        one_line(capsys) == f"hybridcomp report: error: cannot write {tmp_path}/report.html: File too large"
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_written_at_exit_is_told_in_a_line(tmp_path, capsys):
    trace.start(tmp_path / "run")
    for _ in range(100):
        trace.active().span("track", "x" * 100, 0, 1)
    files = FilesAtExit("the decisions", "".join)
    files.add_source(tmp_path / "decided.toml", 5000 * "x")
    with full_disk():
        trace._at_exit()
        tell_failure(files.write)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"hybridcomp: cannot write the trace {tmp_path}/run/trace.0.json: File too large")
    assert second.startswith(
        f"hybridcomp: cannot write the decisions {tmp_path}/decided.toml: File too large"
    )
    assert names(tmp_path) == {"run"}
    assert not names(tmp_path / "run")


# -- reading ---------------------------------------------------------------------------------------------

ROW = {"axis": "dp", "op": "all_reduce", "codec": "int8", "reason": "asked for"}
ROW |= dict.fromkeys(("calls", "raw_bytes", "plain_bytes", "wire_bytes"), 3)
ROW |= dict.fromkeys(("encode_seconds", "wire_seconds", "decode_seconds"), 0.5)
METRICS = [
    {"kind": "start", "parameters": 7, "config": {"dp": 2}},
    {"kind": "train", "step": 1, "loss": 2.5, "replicas": {"shares": [5, 3]}, "wire_bytes": {"dp": 3}},
    {"kind": "eval", "step": 1, "loss": 2.25},
    {
        "kind": "decision",
        "step": 1,
        "axis": "dp",
        "op": "all_reduce",
        "name": "",
        "codec": "int8",
        "why": "x",
    },
    {"kind": "summary", "policy": "p", "steps": 1, "seconds": 1.0, "tokens_per_s": 1.0, "val_loss": 1.0}
    | {"comm": [ROW], "wire_bytes": {"dp": 3}},
]
Reader = Callable[[Path], Any]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def record(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "__0_0.distcp").write_bytes(b"tensors")
    Checkpoint(path.parent, 4, 1.5, "digest", {"dp": 2, "pp": 1}).write(path.parent)


def write_trace(path: Path) -> None:
    two_ranks(path.parent)


def written(data: bytes) -> Reader:
    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return write


POLICY = (
    b'codec = "int8:block=128"\nmin_bytes = 4096\n[dp]\nall_reduce = { codec = "int4", feedback = "ef" }\n'
)
DECIDED = b'[[decision]]\nstep = 40\ncodec = "topk:ratio=0.05"\nname = "layer.0"\nwhy = "gain 0.81"\n'
# By what is read: its file, what writes one that is right, and what reads it.
READERS: dict[str, tuple[str, Reader, Reader]] = {
    "metrics": ("metrics.jsonl", written(lines(METRICS)), lambda path: read_run("it", path)),
    "shares": ("metrics.jsonl", written(lines(METRICS)), lambda path: read_shares(str(path), 2, 4)),
    "trace": ("trace.0.json", write_trace, lambda path: reading.read(path.parent)),
    "policy": ("policy.toml", written(POLICY), load_policy),
    "decisions": ("decided.toml", written(DECIDED), read_decisions),
    "profile": ("profile.toml", written(BUILT_IN.to_bytes()), load_profile),
    "cluster": (
        "cluster.toml",
        written((ROOT / "examples/cluster_16x8.toml").read_bytes()),
        lambda path: read_site(str(path)),
    ),
    "configuration": (
        "run.toml",
        written(b'dp = 2\nlr = 1e-3\nstage_layers = [1, 2]\npolicy = "none"\n'),
        lambda path: read_toml(str(path)),
    ),
    "study": ("study.toml", written((ROOT / "studies/policies.toml").read_bytes()), read_study),
    "checkpoint": (RECORD, record, lambda path: read_checkpoint(path.parent)),
}


def made(folder: Path, what: str) -> tuple[Path, Reader]:
    name, write, read = READERS[what]
    path = folder / "here" / name
    write(path)
    return path, read


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole, which takes no room


def deep(path: Path) -> None:
    """Nest brackets where the format has a value."""
    nested = 10_000 * b"["
    if path.suffix == ".toml":
        path.write_bytes(b"x = " + nested)
    elif path.suffix == ".jsonl":
        path.write_bytes(b'{"kind": ' + nested + b"\n" + path.read_bytes())
    else:
        path.write_bytes(b'{"step": ' + nested)


def numbers(text: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        """Write another number for the first one that is a value."""
        data = path.read_bytes()
        changed = re.sub(rb'("(?:steps|started_ns|step)": |\b(?:message|min_bytes|lr|hosts|step) = )[\d.e+-]+',
                         lambda found: found[1] + text, data)  # fmt: skip
        assert changed != data
        path.write_bytes(changed)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3]),
    "not UTF-8": lambda path: path.write_bytes(path.read_bytes().replace(b"e", b"\xff", 1)),
    "byte order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
    "nested deep": deep,
    "of another format": lambda path: path.write_bytes(b"\x7fELF\0\0"),
    "a list": lambda path: path.write_bytes(b"[]\n"),
    "1e999": numbers(b"1e999"),
    "NaN": numbers(b"NaN"),
    "a number of many digits": numbers(5000 * b"9"),
    "a folder": lambda path: replaced(path, Path.mkdir),
    "a pipe": lambda path: replaced(path, os.mkfifo),
    "a device": lambda path: replaced(path, lambda it: it.symlink_to("/dev/zero")),
    "a link to itself": lambda path: replaced(path, lambda it: it.symlink_to(it)),
    "too large": huge,
}
# What is no damage to a reader: study.toml has no such numbers, a list of TOML's is a table, and so on.
HARMLESS = {("study", "1e999"), ("study", "NaN"), ("study", "a number of many digits")}


def refused(path: Path, read: Reader) -> str:
    with pytest.raises((HybridcompError, ValueError)) as caught:
        read(path)
    assert isinstance(caught.value, HybridcompError), repr(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", READERS)
def test_what_is_damaged_is_refused_in_one_line_with_its_name(tmp_path, what, damage):
    path, read = made(tmp_path, what)
    read(path)
    if (what, damage) in HARMLESS:
        return
    DAMAGES[damage](path)
    told = refused(path, read)
    assert "\n" not in told
    assert ("a byte order mark" in told) == (damage == "byte order mark")
    assert str(path.parent) in told
    assert len(told) < 1000


def changes(data: bytes, seed: str, count: int) -> Iterator[bytes]:
    """Yield a file's bytes with changes: cut off, bytes and words in the place of others, words left out."""
    draw = random.Random(seed)
    tokens = [b"null", b"1e999", b"NaN", b"-1", b"{}", b"[]", b'"x"', b"true", b"\n", b"\x1b", b"\xff", b"\\ud800",
              b"99999999999999999999", b'"', b"=", b"{", b"["]  # fmt: skip
    words = sorted(set(re.findall(rb'"[^"\n]*"|[\w.+-]+', data)))
    for _ in range(count):
        changed = data
        for _ in range(draw.choice((1, 1, 1, 3))):
            how = draw.randrange(4)
            at = draw.randrange(len(changed) + 1)
            if how == 0:
                changed = changed[:at]
            elif how == 1:
                changed = changed[:at] + bytes([draw.randrange(256)]) + changed[at + 1 :]
            else:
                word = draw.choice(words)
                found = [one.start() for one in re.finditer(re.escape(word), changed)] or [at]
                at = draw.choice(found)
                put = draw.choice(tokens + words) if how == 2 else b""
                changed = changed[:at] + put + changed[at + len(word) :]
        yield changed


@pytest.mark.parametrize("what", READERS)
def test_bytes_that_have_changed_are_read_or_refused(tmp_path, what):
    """Any change of a file leaves it right, or is an error of ours; no change is any other exception."""
    path, read = made(tmp_path, what)
    for changed in changes(path.read_bytes(), what, 120):
        path.write_bytes(changed)
        told = None
        try:
            read(path)
        except HybridcompError as error:
            told = str(error)
        assert told is None or (str(path.parent) in told and "\n" not in told), changed


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [
        (1, float, ""),
        (1.5, {"x": float}, "must be an object, not 1.5"),
        ({"x": 1.5}, {"x": float, "y?": int}, ""),
        ({"x": float("inf")}, {"x": float}, "key x must be a finite number, not inf"),
        ({"x": float("nan")}, {"x": float}, "key x must be a finite number, not nan"),
        ({"x": True}, {"x": int}, "key x must be an integer within 64 bits, not True"),
        ({"x": 1.0}, {"x": int}, "key x must be an integer"),
        ({"x": 1 << 64}, {"x": int}, "key x must be an integer within 64 bits, not one of 65 bits"),
        ({"x": 1 << 62}, {"x": int}, ""),
        ({"x": 10**5000}, {"x": float}, "key x must be a finite number, not one of 16610 bits"),
        ({"x": 10**30}, {"x": str}, "key x must be text, not one of 100 bits"),
        ({"x": "\ud800"}, {"x": str}, "key x must be text"),
        ({"x": "é"}, {"x": str}, ""),
        ({"x": None}, {"x": str | None}, ""),
        ({"x": 3}, {"x": str | None}, "key x must be text, not 3"),
        ({}, {"x?": str, "y": str}, "key y is missing"),
        ({"x": None}, {"x?": str}, "key x must be text, not None"),
        ([[1], [2, "3"]], [[int]], "key [1][1] must be an integer"),
        (
            {"x": {"a": {"y": [1, None]}}},
            {"x": {str: {"y": [float]}}},
            "key x.a.y[1] must be a finite number",
        ),
        ({"\x1b": 1}, {str: str}, r"key \x1b must be text"),
        ({"\ud800": 1}, {str: int}, "must be text"),
    ],
)
def test_values_are_of_their_kind_or_named_by_their_key(value, kind, told):
    if not told:
        assert checked(value, kind, "file") is value
        return
    with pytest.raises(ConfigError, match=re.escape(f"file[3]: {told}")):
        checked(value, kind, "file", 3)


COMMANDS: dict[str, tuple[str, list[str]]] = {
    "report of metrics": ("metrics", ["report", "FOLDER"]),
    "report of traces": ("trace", ["report", "FOLDER"]),
    "plan of a cluster": ("cluster", ["plan", "--model", "gpt2", "--batch", "8", "--profile", "FILE"]),
    "plan of a model": ("configuration", ["plan", "--model", "FILE", "--batch", "8", "--profile", "CLUSTER"]),
    "study": ("study", ["study", "--list", "FILE"]),
    "train by a configuration": ("configuration", ["train", "--config", "FILE"]),
    "train by a policy": ("policy", ["train", "--policy", "FILE"]),
    "train from a checkpoint": ("checkpoint", ["train", "--resume", "FOLDER"]),
    "generate": ("checkpoint", ["generate", "FOLDER"]),
    "run by a policy": ("policy", ["run", "--policy", "FILE", "--", "true"]),
}


def one_line(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "damage", ["cut off", "not UTF-8", "byte order mark", "nested deep", "a folder", "a pipe"]
)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_end_with_one_line_and_status_2(tmp_path, command, damage, capsys, monkeypatch):
    what, argv = COMMANDS[command]
    path, _ = made(tmp_path, what)
    DAMAGES[damage](path)
    if what == "checkpoint" and damage in ("a folder", "a pipe"):
        return  # a folder without a record is none of a checkpoint, which the error says
    monkeypatch.setenv("HYBRIDCOMP_TOP", "0")
    places = {
        "FILE": str(path),
        "FOLDER": str(path.parent),
        "CLUSTER": str(ROOT / "examples/cluster_16x8.toml"),
    }
    assert main([places.get(word, word) for word in argv]) == EXIT_WRONG_INPUT
    told = one_line(capsys)
    assert told.startswith(f"hybridcomp {argv[0]}: error: ")
    assert str(path.parent) in told


@pytest.mark.parametrize("what", ["metrics", "trace"])
def test_a_report_of_bytes_that_have_changed(tmp_path, what, capsys):
    path, _ = made(tmp_path, what)
    for changed in changes(path.read_bytes(), f"report of {what}", 60):
        path.write_bytes(changed)
        status = main(["report", str(path.parent)])
        said = capsys.readouterr()
        assert status == 0 or (status == EXIT_WRONG_INPUT and said.err.count("\n") == 1), changed
        assert "\x1b" not in said.out + said.err


# -- nobody else reads or writes -------------------------------------------------------------------------

# Ways to open files, by the name of what is called; of methods, by theirs.
_FUNCTIONS = re.compile(
    r"open|io\.open|os\.(open|fdopen|rename|replace|link|symlink|mkfifo)|tempfile\.(?!gettempdir)\w+|tomllib\.\w+|pickle\.\w+|json\.(load|dump)"
    r"|np\.(save|savez|load|memmap|fromfile|savetxt|loadtxt)|torch\.(save|load)|shutil\.(copy\w*|move)"
)
_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "touch", "rename", "savefig", "tofile", "to_file",
            "from_file", "write_html", "symlink_to", "hardlink_to"}  # fmt: skip
# Who may: a file of the package, what it calls, and why.
ALLOWED = {
    "hybridcomp/breakdown/page.py": {"read_text": "a file of Plotly's"},
    "hybridcomp/collectives/transport/arena.py": {"os.open": "memory of another process, by /proc"},
    "hybridcomp/cuda.py": {
        "read_text": "the package's own sources",
        "os.open": "a lock, which holds nothing",
    },
    "hybridcomp/results/pictures.py": {"savefig": "into memory"},
    "hybridcomp/entry_points.py": {"read_text": "metadata of installed packages, by Python's own reader"},
    "hybridcomp/net/keeper.py": {
        "open": "/proc and control groups; it runs without the package",
        "os.open": "/proc",
    },
    "hybridcomp/net/lab.py": {"tempfile.mkdtemp": "a folder of its own"},
    "hybridcomp/nvrtc.py": {"tempfile.mkdtemp": "a folder of its own"},
    "hybridcomp/pmi/start.py": {"open": "a pipe of a process of its own", "read_text": "/proc"},
    "hybridcomp/policy/load.py": {"read_text": "a preset of the package"},
    "hybridcomp/schedules/draw.py": {"savefig": "into a file that the caller has opened"},
    "hybridcomp/top/publish.py": {
        "os.open": "a rank's own file, made anew without following links, and written over in place"
    },
    "hybridcomp/top/read.py": {
        "os.open": "files of running ranks: no link is followed, and their owner is checked"
    },
    "hybridcomp_lab/train/checkpoints/checkpoint.py": {"rename": "a checkpoint's folder, once it is whole"},
    "hybridcomp_lab/train/checkpoints/stored.py": {"pickle.UnpicklingError": "no file"},
    "hybridcomp_lab/train/text.py": {"np.memmap": "tokens, of which a run reads a part"},
}


def _called(node: ast.Call) -> str:
    """Return the way in which a call may open a file, "" for none."""
    name = ast.unparse(node.func)
    if _FUNCTIONS.fullmatch(name):
        return name
    if not isinstance(node.func, ast.Attribute):
        return ""
    if re.search(r"""^Path\(f?["']/(proc|sys)/""", name):
        return ""
    method, first = node.func.attr, node.args[0] if node.args else None
    mode = first.value if isinstance(first, ast.Constant) else None
    opens = method == "open" and (
        first is None or (isinstance(mode, str) and re.fullmatch("[rwaxbt+]+", mode))
    )
    return method if opens or method in _METHODS else ""


def ways(text: str) -> set[str]:
    """Return the ways in which a module opens files."""
    return {
        way for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and (way := _called(node))
    }


@pytest.mark.parametrize(
    "line",
    ["open(path)", "path.open('wb')", "path.open()", "Path(path).write_text(x)", "os.open(path, 0)", "torch.save(x, p)",
     "tempfile.mkstemp()", "figure.savefig(path)", "tomllib.loads(x)", "x = json.load(file)", "path.rename(other)"],
)  # fmt: skip
def test_ways_to_open_files_are_seen(line):
    assert ways(line)


def test_files_are_opened_in_one_place():
    found = {
        path.relative_to(ROOT).as_posix(): ways(path.read_text())
        for path in modules()
        if path != ROOT / "hybridcomp" / "files.py"
    }
    others = {name: those - set(ALLOWED.get(name, ())) for name, those in found.items()}
    assert {name: those for name, those in others.items() if those} == {}
    unused = {name: set(those) - found.get(name, set()) for name, those in ALLOWED.items()}
    assert {name: those for name, those in unused.items() if those} == {}
