"""What takes several rounds of calls, as generators; nothing is sent here.

A plan yields the calls of a round, by the server's URL, and is sent what each answered, or the
error, in the same order. What it returns is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from recorder_core.client import calls
from recorder_core.client.calls import Call, Result
from recorder_core.client.servers import conclude, raise_together
from recorder_core.drained import Drained, Page, ServerLease, page_name
from recorder_core.errors import LeaseError, RecorderError
from recorder_core.keytree import Selection
from recorder_core.protocol import MAX_KEYS, NOT_SAVED, KeyReply
from recorder_core.recent import News
from recorder_core.trajectories import Keep

Plan = Generator[Mapping[str, Call[Any]], Sequence[Any], Result]


def everywhere(urls: Iterable[str], call: Call[Result]) -> Plan[Result]:
    """One call to every server."""
    asked = dict.fromkeys(urls, call)
    return conclude(asked, (yield asked))


def keys(urls: Sequence[str], where: Selection) -> Plan[list[KeyReply]]:
    """What is there: of each server page after page, then summed."""
    found: dict[str, list[KeyReply]] = {url: [] for url in urls}
    asked = dict.fromkeys(urls, calls.keys(where, None, MAX_KEYS))
    while asked:
        pages = conclude(asked, (yield asked))
        for url, page in pages.items():
            found[url] += page
        asked = {
            url: calls.keys(where, page[-1].key, MAX_KEYS)
            for url, page in pages.items()
            if len(page) == MAX_KEYS
        }
    return calls.merged_keys(found.values())


def recent(
    urls: Iterable[str], after: Mapping[str, str], wait_s: float
) -> Plan[Mapping[str, News]]:
    """What happened on each server after its cursor."""
    asked = {url: calls.recent(after.get(url, ""), wait_s) for url in urls}
    return conclude(asked, (yield asked))


def lease(
    urls: Sequence[str],
    where: Selection,
    name: str,
    *,
    wait_s: float,
    lease_s: float,
    max_bytes: int | None,
    keep: Keep | None,
) -> Plan[Drained]:
    """Hand out what is selected, or a page of it where `max_bytes` is given.

    A server hands out so many runs at a time, each page under a name of its own. Where a server
    fails, what was handed out is given back.
    """
    pages: list[Page] = []
    asked: list[ServerLease] = []
    left = list(urls)
    for number in range(1 << 62):
        page = page_name(name, number)
        call = calls.drain(where, page, 0.0 if number else wait_s, lease_s, max_bytes)
        asked += [ServerLease(url, page) for url in left]
        round_ = dict.fromkeys(left, call)
        try:
            answers = conclude(round_, (yield round_))
        except RecorderError:
            if len(asked) > 1:
                yield from _attempts(asked, calls.release)
            raise
        pages += [Page(url, head, runs) for url, (head, runs) in answers.items()]
        left = [url for url, (head, _) in answers.items() if head.more and max_bytes is None]
        if not left:
            break
    return Drained.of(pages, keep)


def settle(leases: Sequence[ServerLease], call: Callable[[ServerLease], Call[Any]]) -> Plan[int]:
    """Make a call for every lease; returns the sum of the answers.

    Raises:
        RecorderError: The first error, by its type, after the others were tried.
    """
    answers = yield from _attempts(leases, call)
    errors = [each for each in answers if isinstance(each, RecorderError)]
    if errors:
        raise_together(errors, len(leases), "leases", "the call can be repeated")
    return sum(each for each in answers if each is not None)


def _attempts(
    leases: Iterable[ServerLease], call: Callable[[ServerLease], Call[Any]]
) -> Plan[list[Any]]:
    """Make a call for every lease, one after the other on each server.

    What else a server is asked for gets between. Of one that fails the rest is left, and comes
    back in time.
    """
    left: dict[str, list[ServerLease]] = {}
    for each in leases:
        left.setdefault(each.url, []).append(each)
    answers: list[Any] = []
    while left:
        asked = {url: call(waiting[0]) for url, waiting in left.items()}
        parts = yield asked
        answers += parts
        failed = {
            url
            for url, part in zip(asked, parts, strict=True)
            if isinstance(part, RecorderError) and not _answered(part)
        }
        left = {
            url: waiting[1:] for url, waiting in left.items() if waiting[1:] and url not in failed
        }
    return answers


def _answered(error: RecorderError) -> bool:
    """Whether a server that gave an error can be asked for the next.

    It knew the lease no more, or could not save what is in effect.
    """
    return isinstance(error, LeaseError) or getattr(error, "status", None) == NOT_SAVED
