"""Keep the results of the matrix: one file for each benchmark, with a line for each of its cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """The result files of a folder: ``allreduce.json`` holds those of ``allreduce_1gbit_4x1_64M`` and its like.

    Args:
        folder: is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def __contains__(self, name: str) -> bool:
        return name in self._read(self._file(name))

    def add(self, name: str, record: Record) -> None:
        """Write a cell's record, in place of an earlier one of that name."""
        path = self._file(name)
        records = {**self._read(path), name: record}
        lines = [f"{json.dumps(key)}: {json.dumps(records[key])}" for key in sorted(records)]
        new = path.with_suffix(".new")
        new.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        new.replace(path)

    def all(self) -> list[Record]:
        """Return all records, in the order of their names."""
        found: dict[str, Record] = {}
        for path in self.folder.glob("*.json"):
            found |= self._read(path)
        return [found[name] for name in sorted(found)]

    def _file(self, name: str) -> Path:
        place = name.rsplit("_", 3)  # reduce_scatter_1gbit_4x1_64M
        return self.folder / f"{place[0]}.json"

    @staticmethod
    def _read(path: Path) -> dict[str, Record]:
        if not path.exists():
            return {}
        records: dict[str, Record] = json.loads(path.read_text(encoding="utf-8"))
        return records
