"""The HTTP side of recording, for any ASGI application that serves an engine.

Needs the extra `recorder-core[server]`; nothing else in the package imports a web framework.
"""

from recorder_core.server.auth import AdminGuard, PreflightGuard
from recorder_core.server.metrics import RecorderCollector
from recorder_core.server.middleware import IdentityMiddleware
from recorder_core.server.router import records_router
from recorder_core.view.shell import PageMiddleware

__all__ = [
    "AdminGuard",
    "IdentityMiddleware",
    "PageMiddleware",
    "PreflightGuard",
    "RecorderCollector",
    "records_router",
]
