"""``python -m hybridcomp`` is the ``hybridcomp`` command."""

from __future__ import annotations

import sys

from hybridcomp.cli.main import main

sys.exit(main())
