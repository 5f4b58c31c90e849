"""Print kernels' resources, from ptxas's reports (files MODULE.log of a folder): registers, shared memory, spills."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

NAME = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def main(folder: Path) -> None:
    """Print a row for each kernel."""
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    spills = []
    for report in sorted(folder.glob("*.log")):
        module, kernel, arch = report.stem, "", ""
        for line in report.read_text().splitlines():
            if found := NAME.search(line):
                kernel, arch = found.groups()
            elif found := STACK.search(line):
                stack, stores, loads = map(int, found.groups())
                if stack or stores or loads:
                    spills.append(
                        f"{module}: {kernel} on {arch}: {stack} bytes of stack, {stores + loads} of spills"
                    )
            elif found := USED.search(line):
                shared = SHARED.search(line)
                rows[f"{module:12} {kernel}"][arch] = f"{found[1]:>4} {shared[1] if shared else 0:>6}"
    archs = sorted({arch for row in rows.values() for arch in row})
    print(f"{'module':12} {'kernel':38}" + "".join(f"  {arch:>5}: regs, smem" for arch in archs))
    for name, row in rows.items():
        print(f"{name:51}" + "".join(f"{row.get(arch, ''):>18}" for arch in archs))
    print(
        "\n".join(["stack or spills:", *spills]) if spills else "no kernel spills registers or uses a stack"
    )


main(Path(sys.argv[1]))
