"""Run the ``hybridcomp`` command: ``python -m hybridcomp``."""

from __future__ import annotations

import sys

from hybridcomp.cli.main import main

sys.exit(main())
