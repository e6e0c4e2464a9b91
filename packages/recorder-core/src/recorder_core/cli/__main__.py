"""`python -m recorder_core.cli`, where the command `recorder` is not on the path."""

from __future__ import annotations

import sys

from recorder_core.cli import main

sys.exit(main())
