"""Read and write files: what is written is whole or not there, and what was read is what it should be.

All files of the package go through here (tests/test_files.py holds the others to it). Nothing is written through a
symbolic link, and nothing half done stays: a full disk leaves an earlier file as it was. Files from a user or an
earlier run are read with one error for all that can be wrong with them: one line, with the file and the place in it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import stat
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, get_args

from hybridcomp.errors import ConfigError, HybridcompError, printable

MOST_BYTES = 1 << 30  # bytes of a file that is read whole, at most
MOST_CONFIG_BYTES = 1 << 24  # bytes of a file that a person may have written, at most
_DEEP = 100  # levels of nesting that no file of ours has
_INSIDE = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\[{]|[\]}]')
_LONG_NUMBER = re.compile(r"\d{4301}")  # Python reads no integer of more than 4300 digits
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_STREAM = re.compile(r"/dev/(std(out|err)|fd/\d+)|/proc/self/fd/\d+")
_MOST_SHOWN = 60  # characters of a wrong value in an error
_HALF = re.compile("[\ud800-\udfff]")  # a half of a character, which can be printed nowhere
_LEAST, _MOST = -(1 << 62), 1 << 62
_ABSENT = object()
_WORDS = {
    bool: "true or false",
    str: "text",
    int: "an integer within 64 bits",
    float: "a finite number",
    dict: "an object",
    list: "a list",
}

StrPath = str | os.PathLike[str]
Kind = Any
Error = type[HybridcompError]


# -- writing ---------------------------------------------------------------------------------------------


@contextmanager
def writing(
    path: StrPath, *, what: str = "", durable: bool = False, error: Error = ConfigError
) -> Iterator[BinaryIO]:
    """Write a file, which is there under its name once the block has ended, and not before; make its folder.

    It is written beside and renamed: an earlier file stays as it was until then, and where the block raises. A symbolic
    link of the name is replaced, not followed. A device or a pipe that is there is written to as it is, and so are this
    process's own files, ``/dev/stdout`` for one.

    Args:
        path: path of the file.
        what: kind of the file in the error's words, such as ``"the trace"``.
        durable: whether the file is on the disk itself before the block ends.
        error: class of the error.

    Yields:
        The file, opened for bytes.

    Raises:
        HybridcompError: the file cannot be written, by ``error``; the disk is full, say.
    """
    place = Path(path)
    try:
        if _is_stream(place):
            with os.fdopen(_open_stream(place), "wb") as file:
                yield file
            return
        _make_folder(place.parent)
        mode = _mode_there(place)
        beside = place.parent / f".hybridcomp-{os.urandom(8).hex()}.partial"  # fits where the name does
        number = os.open(beside, _NEW, 0o666)
        file = os.fdopen(number, "wb")
        try:
            if mode is not None:
                os.fchmod(number, mode)
            yield file
            file.flush()
            if durable:
                os.fsync(number)
            file.close()
            os.replace(beside, place)
        except BaseException:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                os.unlink(beside)
            raise
        if durable:
            sync_folder(place.parent)
    except OSError as failed:
        raise error(f"cannot write {_named(what, place)}: {failed.strerror or failed}") from failed


def write_bytes(
    path: StrPath, data: bytes, *, what: str = "", durable: bool = False, error: Error = ConfigError
) -> None:
    """Write a file whole, or not at all; see :func:`writing`.

    Raises:
        HybridcompError: the file cannot be written, by ``error``.
    """
    with writing(path, what=what, durable=durable, error=error) as file:
        file.write(data)


def write_text(
    path: StrPath, text: str, *, what: str = "", durable: bool = False, error: Error = ConfigError
) -> None:
    """Write a file of UTF-8 text whole, or not at all; see :func:`writing`.

    Raises:
        HybridcompError: the file cannot be written, by ``error``.
    """
    # Names of files may hold what is no text; it is told by its escapes.
    write_bytes(path, text.encode(errors="backslashreplace"), what=what, durable=durable, error=error)


def sync_folder(folder: Path) -> None:
    """Make the names of a folder's files durable on the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def alone_in(folder: StrPath) -> Iterator[None]:
    """Keep other processes that do the same out of a folder within the block; make it.

    It ends with the process, however that ends. Where a file system locks no folders, none is kept out.

    Raises:
        ConfigError: another process is in it, or it cannot be made.
    """
    place = Path(folder)
    try:
        _make_folder(place)
        number = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot write to {printable(place)}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is at work in {printable(place)}") from None
        except OSError:
            pass  # a network's file system, say
        yield
    finally:
        os.close(number)


class Log:
    """File that grows by whole pieces; a context manager.

    Args:
        path: path of the file; another one there is replaced.
        kept: contents to begin with.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: StrPath, kept: bytes = b"") -> None:
        self._path = Path(path)
        write_bytes(path, kept)
        try:
            self._file = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            raise ConfigError(f"cannot write {printable(path)}: {error.strerror}") from error

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, text: str) -> None:
        """Append text, all of it or nothing.

        Raises:
            ConfigError: the disk is full, say.
        """
        data = text.encode(errors="backslashreplace")
        try:
            before = os.fstat(self._file).st_size
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except BaseException:
                os.ftruncate(self._file, before)
                raise
        except OSError as error:
            raise ConfigError(f"cannot write {printable(self._path)}: {error.strerror}") from error

    def fileno(self) -> int:
        """Return the file's descriptor, for a process that writes into it."""
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def set_aside(path: Path) -> Path:
    """Give a file that is damaged, or anything else that stands in its place, a free name beside it; return that.

    Raises:
        ConfigError: it cannot be renamed.
    """
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in range(1 << 16))
    free = next(name for name in names if not os.path.lexists(name))
    try:
        os.rename(path, free)
    except OSError as error:
        raise ConfigError(f"cannot rename {printable(path)}: {error.strerror}") from error
    return free


def tell_failure(action: Callable[[], object]) -> None:
    """Do what writes a file as the process ends: an error becomes a line on stderr, and the exit status stays."""
    try:
        action()
    except HybridcompError as error:
        print(f"hybridcomp: {error}", file=sys.stderr, flush=True)


def _is_stream(path: Path) -> bool:
    """Tell whether a path leads to a device, a pipe, or a descriptor of this process."""
    if _STREAM.fullmatch(str(path)):
        return True
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _open_stream(path: Path) -> int:
    # A pipe that nobody reads refuses, and would have this process wait.
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_blocking(number, True)
    return number


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # Python's word for a file in the place of the folder
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def _mode_there(path: Path) -> int | None:
    """Return the permissions of the file that a new one replaces, if there is one.

    Raises:
        OSError: what is there is no file.
    """
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(info.st_mode):
        return None
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"it is {_kind_of(info.st_mode)}")
    return stat.S_IMODE(info.st_mode) if info.st_uid == os.getuid() else None


# -- reading ---------------------------------------------------------------------------------------------


def listed(folder: StrPath, pattern: str) -> list[Path]:
    """Return what a folder has of a pattern, in order of names; nothing where there is no such folder."""
    return sorted(Path(folder).glob(pattern)) if os.path.isdir(folder) else []


def open_file(path: StrPath, *, what: str = "", error: Error = ConfigError) -> BinaryIO:
    """Open a file to read; never waits, as a pipe has it.

    Raises:
        HybridcompError: it cannot be read, or is a folder, a pipe or a device; by ``error``.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            mode = os.fstat(number).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(f"it is {_kind_of(mode)}, and no file")
            return os.fdopen(number, "rb")
        except BaseException:
            os.close(number)
            raise
    except (OSError, ValueError) as failed:  # a path with a null character
        why = failed.strerror if isinstance(failed, OSError) else None
        raise error(f"cannot read {_named(what, path)}: {why or failed}") from failed


def read_bytes(
    path: StrPath, *, what: str = "", start: int = 0, most: int = MOST_BYTES, error: Error = ConfigError
) -> bytes:
    """Read a file whole, or from a position on.

    Args:
        path: path of the file.
        what: kind of the file in the error's words, such as ``"the trace"``.
        start: position of the first byte to read.
        most: bytes to read, at most.
        error: class of the error.

    Raises:
        HybridcompError: the file cannot be read (:func:`open_file`), or is too large; by ``error``.
    """
    with open_file(path, what=what, error=error) as file:
        try:
            size = os.fstat(file.fileno()).st_size - start
            file.seek(start)
            data = b"" if size > most else file.read()
        except OSError as failed:
            raise error(f"cannot read {_named(what, path)}: {failed.strerror}") from failed
    if max(size, len(data)) > most:
        raise error(f"cannot read {_named(what, path)}: it has more than {most} bytes")
    return data


def read_text(
    path: StrPath, *, what: str = "", most: int = MOST_CONFIG_BYTES, error: Error = ConfigError
) -> str:
    """Read a file of UTF-8 text.

    Raises:
        HybridcompError: the file cannot be read (:func:`read_bytes`), is not UTF-8, or has a byte order mark; by
            ``error``.
    """
    return decoded(read_bytes(path, what=what, most=most, error=error), _named(what, path), error=error)


def decoded(data: bytes, name: str, *, line: int = 1, error: Error = ConfigError) -> str:
    """Return bytes as UTF-8 text.

    Args:
        data: bytes of a file, or of some lines of it.
        name: name of the file, for the error.
        line: number of the first line.
        error: class of the error.

    Raises:
        HybridcompError: the bytes are not UTF-8, or begin with a byte order mark; by ``error``.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        raise error(f"{name}: line {line}, column 1: a byte order mark; save it as UTF-8 without one")
    try:
        return data.decode()
    except UnicodeDecodeError as failed:
        where = _place(data[: failed.start].decode(), failed.start, line)
        raise error(f"{name}: {where}: not UTF-8 text (byte {failed.start})") from failed


def read_json(path: StrPath, *, what: str = "", most: int = MOST_BYTES, error: Error = ConfigError) -> Any:
    """Read a file of JSON.

    Raises:
        HybridcompError: the file cannot be read (:func:`read_text`), or is no JSON; by ``error``.
    """
    return parse_json(read_text(path, what=what, most=most, error=error), _named(what, path), error=error)


def parse_json(
    text: str, name: str, *, line: int = 1, nan: float | None = math.nan, error: Error = ConfigError
) -> Any:
    """Parse JSON.

    Args:
        text: text of a file, or of one line of it.
        name: name of the file, for the error.
        line: number of the first line.
        nan: value of ``NaN`` and ``Infinity``, which Python writes though JSON has them not.
        error: class of the error.

    Raises:
        HybridcompError: the text is no JSON; by ``error``, with line and column.
    """
    try:
        return json.loads(text, parse_constant=lambda _: nan)
    except json.JSONDecodeError as failed:
        raise error(f"{name}: {_place(text, failed.pos, line)}: not JSON: {failed.msg}") from failed
    except (ValueError, RecursionError) as failed:
        _refuse(text, f"{name}: not JSON", line, error, failed)


def parse_line(
    line: bytes,
    name: str,
    number: int,
    kind: Kind,
    *,
    nan: float | None = math.nan,
    error: Error = ConfigError,
) -> Any:
    """Parse a line of a file of JSON lines.

    Args:
        line: bytes of the line.
        name: name of the file, for the error.
        number: number of the line.
        kind: kind of its value (:func:`checked`).
        nan: see :func:`parse_json`.
        error: class of the error.

    Raises:
        HybridcompError: the line is no such value; by ``error``.
    """
    text = decoded(line, name, line=number, error=error)
    value = parse_json(text, name, line=number, nan=nan, error=error)
    return checked(value, kind, f"{name}: line {number}", error=error)


def read_toml(
    path: StrPath, *, what: str = "", most: int = MOST_CONFIG_BYTES, error: Error = ConfigError
) -> dict[str, Any]:
    """Read a file of TOML.

    Raises:
        HybridcompError: the file cannot be read (:func:`read_text`), or is no TOML; by ``error``.
    """
    return parse_toml(read_text(path, what=what, most=most, error=error), _named(what, path), error=error)


def parse_toml(text: str, name: str, *, error: Error = ConfigError) -> dict[str, Any]:
    """Parse TOML.

    Args:
        text: text of a file.
        name: name of the file, for the error.
        error: class of the error.

    Raises:
        HybridcompError: the text is no TOML; by ``error``, with line and column.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as failed:
        found = re.fullmatch(
            r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", str(failed), re.DOTALL
        )
        if found is None:
            raise error(f"{name}: not TOML: {failed}") from failed
        where = f"line {found[2]}, column {found[3]}" if found[2] else _place(text, len(text), 1)
        line = text.split("\n")[int(found[2]) - 1 if found[2] else -1]
        key = re.match(r"\s*([\w.\"'-]+)\s*(=|$)", line)
        raise error(f"{name}: {where}{f', key {key[1]}' if key else ''}: not TOML: {found[1]}") from failed
    except (ValueError, RecursionError) as failed:
        _refuse(text, f"{name}: not TOML", 1, error, failed)
    level: list[Any] = [document]
    for _ in range(_DEEP):  # a key of a thousand parts makes as many tables
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
        level = [part for part in level if isinstance(part, dict | list)]
    if level:
        raise error(f"{name}: not TOML of ours: nested more than {_DEEP} deep")
    return document


def _refuse(text: str, said: str, line: int, error: Error, failed: Exception) -> NoReturn:
    """Raise the error for text that a parser gives up on without naming a place."""
    if not isinstance(failed, RecursionError):
        found = _LONG_NUMBER.search(text)
        where = "" if found is None else f"{_place(text, found.start(), line)}: "
        raise error(f"{said}: {where}{failed}") from failed
    depth = at = 0
    for match in _INSIDE.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        at = match.start()
        if depth > _DEEP:
            break
    raise error(f"{said}: {_place(text, at, line)}: nested too deep") from None


def _place(text: str, position: int, line: int) -> str:
    """Return line and column of a character, the first of a text's line given."""
    before = text[:position]
    return f"line {line + before.count(chr(10))}, column {len(before) - before.rfind(chr(10))}"


def _kind_of(mode: int) -> str:
    """Return what is no file, in a word."""
    for is_it, name in ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket")):
        if is_it(mode):
            return name
    return "a device"


def _named(what: str, path: StrPath) -> str:
    """Return a file's name for an error, its kind before it."""
    return f"{what} {printable(path)}" if what else printable(path)


# -- checking --------------------------------------------------------------------------------------------


class _WrongError(Exception):
    """Value of another kind than it must be; its key path is built on the way out."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(what)
        self.path = path


def checked(
    value: Any, kind: Kind, where: str, index: int | None = None, *, error: Error = ConfigError
) -> Any:
    """Return a parsed value if it is of a kind.

    Args:
        value: value of JSON or TOML.
        kind: ``bool``, ``str``, ``int`` (within 64 bits), ``float`` (any finite number), ``list``, ``dict``, ``Any``;
            ``X | None``; ``[X]``, a list of X; ``{str: X}``, an object whose values are X; ``{"a": X, "b?": Y}``, an
            object with these keys, of which that with a ``?`` may be missing, and any others.
        where: file of the value and its place there, for the error.
        index: index of the value in the list that ``where`` names.
        error: class of the error.

    Raises:
        HybridcompError: it is of another kind; by ``error``, with the key path.
    """
    try:
        _check(value, kind)
    except _WrongError as failed:
        path = printable(failed.path.removeprefix("."))
        where += "" if index is None else f"[{index}]"
        raise error(f"{where}: {f'key {path} ' if path else ''}{failed}") from None
    return value


def _check(value: Any, kind: Kind) -> None:
    if kind is Any:
        return
    if isinstance(kind, types.UnionType):
        if value is not None:
            _check(value, get_args(kind)[0])
    elif isinstance(kind, list):
        if not isinstance(value, list):
            _wrong(_WORDS[list], value)
        for index, one in enumerate(value):
            _check_part(one, kind[0], f"[{index}]")
    elif not isinstance(kind, Mapping):
        if not _is_plain(value, kind):
            _wrong(_WORDS[kind], value)
    elif not isinstance(value, dict):
        _wrong(_WORDS[dict], value)
    elif str in kind:
        for key, one in value.items():
            _check_part(key, str, "")
            _check_part(one, kind[str], f".{key}")
    else:
        _check_fields(value, kind)


def _check_fields(value: dict[str, Any], kinds: Mapping[str, Kind]) -> None:
    for key, of in kinds.items():
        one = value.get(key, _ABSENT)
        # Traces have millions of such fields: most are seen to be right here.
        if one.__class__ is of and (
            one.isascii() if of is str else _LEAST <= one <= _MOST if of is int or of is float else False
        ):
            continue
        if one is _ABSENT:
            name = key.removesuffix("?")
            if name == key:
                raise _WrongError("is missing", f".{name}")
            if name in value:
                _check_part(value[name], of, f".{name}")
        else:
            _check_part(one, of, f".{key}")


def _check_part(value: Any, kind: Kind, name: str) -> None:
    try:
        _check(value, kind)
    except _WrongError as failed:
        failed.path = name + failed.path
        raise


def _is_plain(value: Any, kind: type) -> bool:
    if kind is int:
        return type(value) is int and value.bit_length() < 64
    if kind is float:
        return (type(value) is int and value.bit_length() < 64) or (
            type(value) is float and math.isfinite(value)
        )
    if kind is str:
        return isinstance(value, str) and (value.isascii() or not _HALF.search(value))
    return isinstance(value, kind)


def shown(value: Any) -> str:
    """Return a value from outside in a few characters."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python writes none of thousands of digits
        return f"one of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # nested deep, or with such an integer in it
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _wrong(wanted: str, value: Any) -> NoReturn:
    raise _WrongError(f"must be {wanted}, not {shown(value)}")
