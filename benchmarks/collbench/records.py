"""Keep the results of the matrix: one file for each benchmark, with a line for each of its cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridcomp.files import write_text

Record = dict[str, Any]


class Records:
    """The result files of a folder: ``allreduce.json`` holds the records of ``allreduce_1gbit_4x1_64M`` and its like.

    Args:
        folder: folder of the files; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._records: dict[str, Record] = {}
        for path in folder.glob("*.json"):
            self._records |= json.loads(path.read_text(encoding="utf-8"))

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def add(self, name: str, record: Record) -> None:
        """Write a cell's record, in place of an earlier one of that name."""
        self._records[name] = record
        benchmark = _benchmark(name)
        lines = [
            f"{json.dumps(key)}: {json.dumps(self._records[key])}"
            for key in sorted(self._records)
            if _benchmark(key) == benchmark
        ]
        path = self.folder / f"{benchmark}.json"
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    def all(self) -> list[Record]:
        """Return all records, in the order of their names."""
        return [self._records[name] for name in sorted(self._records)]


def _benchmark(name: str) -> str:
    """Return the benchmark of a cell's name: ``reduce_scatter`` of ``reduce_scatter_1gbit_4x1_64M``."""
    return name.rsplit("_", 3)[0]
