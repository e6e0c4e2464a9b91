"""The environment variables that are read, by name."""

from __future__ import annotations

ADMIN_KEY_VARIABLE = "RECORDER_ADMIN_KEY"
"""The admin key of `/records`, for servers and for whoever asks them."""
SECRET_VARIABLE = "RECORDER_SECRET"  # noqa: S105 - its name
"""What run keys are signed with, for servers and schedulers."""
URL_VARIABLE = "RECORDER_URL"
"""Where the command finds the engines: URLs, separated by commas."""
