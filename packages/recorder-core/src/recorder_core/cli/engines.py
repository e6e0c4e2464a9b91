"""Runs on engines, one or many replicas, as one source."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from recorder_core.cli.adminkey import AdminKey
from recorder_core.cli.exits import CommandError, Exit
from recorder_core.client import RecordClient
from recorder_core.errors import BadRequestError, ServerFaultError
from recorder_core.keys import KeyPrefix, RecordKey
from recorder_core.protocol import KeyReply
from recorder_core.runs import Run
from recorder_core.view.pieces import NoPiecesError


@contextmanager
def connected(
    args: argparse.Namespace,
    urls: Sequence[str],
    told: Callable[[int, int], None] | None = None,
) -> Iterator[RecordClient]:
    """A client of the engines.

    Args:
        args: The command line, which says where the admin key is.
        urls: Of the engines.
        told: Told while runs arrive; see `RecordClient`.

    Raises:
        CommandError: A URL or the key cannot be used.
    """
    try:
        client = RecordClient(urls, admin_key=AdminKey.of(args).text, progress=told)
    except ValueError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    with client:
        yield client


class Engines:
    """The runs that engines hold; they stay there.

    Args:
        client: Of the engines.
        drained: Whether a run is shown with what was drained of it and is still remembered.
    """

    def __init__(self, client: RecordClient, *, drained: bool = False) -> None:
        self.name = ", ".join(client.urls)
        """For messages."""
        self.client = client
        self._drained = drained

    def keys(self, prefix: KeyPrefix) -> list[KeyReply]:
        """What the engines have, run by run, summed over them."""
        return self.client.keys(prefix)

    def runs(self, prefix: KeyPrefix) -> Iterator[Run]:
        """The runs, keys in order: the runs of a task at a time, so that few are held."""
        keys = (each.key for each in self.keys(prefix) if each.records)
        for (batch, task), found in groupby(keys, lambda key: (key.batch, key.task)):
            wanted = set(found)
            if len(wanted) == 1:
                yield from self.client.runs(key=next(iter(wanted)))
            else:
                below = self.client.runs(KeyPrefix(f"{batch}/{task}"))
                yield from (run for run in below if run.key in wanted)

    def run(self, key: RecordKey) -> Run | None:
        """One run; None if it is not there."""
        return next(iter(self.client.runs(key=key, drained=self._drained)), None)

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of token ids, from an engine's tokenizer.

        Raises:
            NoPiecesError: The engine does not know them.
        """
        try:
            return self.client.pieces(ids)
        except (BadRequestError, ServerFaultError) as error:
            raise NoPiecesError(str(error)) from None
