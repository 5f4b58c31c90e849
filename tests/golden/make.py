"""Write the golden messages of codecs that have none: ``python -m tests.golden.make``.

What is there already stays as it is, since it stands for the messages that other versions wrote. Each codec has some
of its default parameters, by which these and its wire id are held. Other specs may be named as arguments.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hybridcomp.codecs import own_names
from hybridcomp.testing import write_golden

FILE = Path(__file__).with_name("messages.json")
GOLDEN: dict[str, dict[str, str]] = json.loads(FILE.read_text())
SPECS = list(dict.fromkeys(key.rsplit(" ", 2)[0] for key in GOLDEN))

if __name__ == "__main__":
    write_golden(FILE, [*own_names(), *sys.argv[1:]])
