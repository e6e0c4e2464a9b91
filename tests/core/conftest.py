"""How many examples property tests draw: few in `make test`, many in `make test-all`."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("full", max_examples=300, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
