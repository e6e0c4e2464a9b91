"""A server of its own for the page: over engines or files, on this machine, for one browser.

It holds the engines' admin key itself. Its page gets a token in the address's fragment, which is
sent to nobody, works once, and is changed for a key of the session.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import webbrowser


def run(
    sources: list[str],
    *,
    port: int,
    open_browser: bool,
    admin_key: str | None,
    tokenizer: str | None,
) -> int:
    """Serve the page until it is interrupted; the address goes to stdout.

    Args:
        sources: URLs of engines, and files of drained runs.
        port: Where to listen on 127.0.0.1; 0: anywhere.
        open_browser: Whether to open the page.
        admin_key: What the engines ask for.
        tokenizer: A folder with a `tokenizer.json`, or that file; None: the engines' own.

    Returns:
        The exit code: 0 when it was interrupted, 1 where it could not begin, 2 for no sources.
    """
    if not sources:
        return _refuse("give the URL of an engine, or a file of drained runs", 2)
    try:
        import uvicorn

        from recorder_core.errors import RecorderError
        from recorder_core.view.app import create_app
        from recorder_core.view.pieces import pieces_from
        from recorder_core.view.sources import Sources
    except ImportError as error:
        return _refuse(f"{error}; it needs: pip install 'recorder-core[view]'", 1)
    try:
        pieces = None if tokenizer is None else pieces_from(tokenizer)
        shown = Sources(sources, admin_key=admin_key, pieces=pieces)
    except (OSError, RecorderError) as error:
        return _refuse(str(error), 1)
    token = secrets.token_urlsafe(24)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()  # whoever follows the address at once waits, and is not refused
        except (OSError, OverflowError) as error:
            return _refuse(f"port {port} cannot be listened on ({error}); give another --port", 1)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/records/view#token={token}"

        def ready() -> None:
            sys.stdout.write(f"{address}\n")
            sys.stdout.flush()
            if open_browser and not webbrowser.open(address):
                sys.stderr.write("recorder: no browser was found; open the address above\n")

        config = uvicorn.Config(
            create_app(shown, token, ready), log_level="critical", timeout_graceful_shutdown=1
        )
        with contextlib.suppress(KeyboardInterrupt):  # as it is meant to end
            uvicorn.Server(config).run(sockets=[listener])
    return 0


def _refuse(why: str, code: int) -> int:
    sys.stderr.write(f"recorder: {why}\n")
    return code
