"""Run the code of a page in order, on every rank: ``mpiexec -n 4 python page.py docs/torch.md``.

Code that follows a comment ``<!-- not run: why -->`` is left out.
"""

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?```python\n(.*?)```", re.DOTALL)


def main(path: str) -> None:
    page = Path(path).read_text(encoding="utf-8")
    scope: dict[str, object] = {}
    count = 0
    for found in BLOCK.finditer(page):
        if found[1] is None:
            line = page.count("\n", 0, found.start(2))
            exec(compile("\n" * line + found[2], path, "exec"), scope)
            count += 1
    print(f"ran {count} blocks\n", end="")


if __name__ == "__main__":
    main(sys.argv[1])
