"""Signed keys: only what was signed with the secret, unchanged and in time, is a run's key."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import logging
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder_core import RecordKey
from recorder_core.context import Identity, identify
from recorder_core.errors import InvalidKeyError, SignatureError
from recorder_core.keys import sign, verify
from recorder_core.options import RecordingOptions, add_arguments
from recorder_core.recorder import Recorder
from recorder_core.server import IdentityMiddleware
from tests.core.test_keys import keys

SECRET = "a secret that the tests know, and no agent"
OTHER_SECRET = "another secret, which signs for other engines"
KEY = RecordKey("0", "task-7", 1)
VISIBLE = "".join(map(chr, range(0x21, 0x7F)))


def reason(text: str, now: float = 0.0, secret: str = SECRET) -> str:
    with pytest.raises(SignatureError) as refused:
        verify(text, secret, now=now)
    return refused.value.reason


@given(keys, st.floats(0.001, 1e6), st.floats(0, 2e9))
def test_a_signed_key_stands_for_its_run_until_its_time_is_over(key, lifetime_s, now):
    text = sign(key, SECRET, lifetime_s, now=now)
    assert text.isascii()
    assert text.isprintable()
    assert " " not in text
    assert verify(text, SECRET, now=now) == key
    assert verify(text, SECRET, now=now + lifetime_s * 0.99) == key
    assert reason(text, now + lifetime_s + 1) == "expired"
    assert reason(text, now, OTHER_SECRET) == "forged"
    assert reason(str(key), now) in ("unsigned", "forged")


@given(keys, st.data())
def test_a_key_of_which_any_character_is_another_is_refused(key, data):
    text = sign(key, SECRET, 60, now=0)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from(VISIBLE).filter(lambda character: character != text[at]))
    assert reason(text[:at] + other + text[at + 1 :]) in ("forged", "unsigned")


@given(keys, st.data())
def test_a_key_with_a_character_more_or_less_is_refused(key, data):
    text = sign(key, SECRET, 60, now=0)
    at = data.draw(st.integers(0, len(text)))
    more = data.draw(st.sampled_from(VISIBLE))
    if (longer := text[:at] + more + text[at:]) != text:
        assert reason(longer) in ("forged", "unsigned")
    if (shorter := text[: at - 1] + text[at:]) != text:
        assert reason(shorter) in ("forged", "unsigned")


def test_every_character_of_a_signed_key_counts():
    """Each place, each other character: none is left to chance."""
    text = sign(KEY, SECRET, 60, now=0)
    for at, character in enumerate(text):
        for other in VISIBLE:
            if other != character:
                assert reason(text[:at] + other + text[at + 1 :]) in ("forged", "unsigned")


@given(keys, keys, st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_signature_belongs_to_one_run_and_one_expiry(key, other, lifetime_s, longer_s):
    text = sign(key, SECRET, lifetime_s, now=0)
    _, _, signature = text.rpartition("~")
    if key != other:
        assert reason(f"{other}~{signature}") == "forged"
    if lifetime_s != longer_s:
        mac = signature.partition(".")[2]
        assert reason(f"{key}~{longer_s}.{mac}") == "forged"


def test_a_run_whose_name_looks_signed_is_told_from_a_signed_run():
    inner = sign(KEY, SECRET, 60, now=0)
    outer = sign(inner, SECRET, 60, now=0)
    assert verify(inner, SECRET, now=0) == KEY
    assert verify(outer, SECRET, now=0) == RecordKey.parse(inner)


def test_the_signature_is_that_of_the_standard():
    text = sign(KEY, SECRET, 60, now=0)
    expected = hmac.new(SECRET.encode(), b"recorder key 1\0" + b"0/task-7/1~60", hashlib.sha256)
    alphabet = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
    number = int.from_bytes(expected.digest()[:16], "big") << 4
    digits = "".join(alphabet[number >> shift & 63] for shift in range(126, -1, -6))
    assert text == f"0/task-7/1~60.{digits}"


def test_signatures_are_compared_in_constant_time(monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b)
    )
    text = sign(KEY, SECRET, 60, now=0)
    verify(text, SECRET, now=0)
    assert reason(text[:-1] + ("A" if text[-1] != "A" else "B")) == "forged"
    assert len(compared) == 2


@pytest.mark.parametrize("lifetime_s", [0, -1, float("nan"), float("inf")])
def test_a_lifetime_that_is_none_is_refused(lifetime_s):
    with pytest.raises(ValueError, match="lifetime_s"):
        sign(KEY, SECRET, lifetime_s)


def test_a_secret_that_can_be_guessed_is_refused():
    for make in (
        lambda secret: sign(KEY, secret, 60),
        lambda secret: IdentityMiddleware(None, secret=secret),
    ):
        with pytest.raises(ValueError, match="at least 32"):
            make("secret")


def test_only_a_record_key_is_signed():
    with pytest.raises(InvalidKeyError):
        sign("sk-abc", SECRET, 60)


# Of a request


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "missing"),
        ("EMPTY", "not_a_key"),
        ("0/task-7/1", "unsigned"),
        ("a/b", "unsigned"),
        (sign(KEY, SECRET, 60, now=0), "expired"),
        (sign(KEY, OTHER_SECRET, 1e9), "forged"),
    ],
)
def test_what_is_not_signed_is_named_by_its_reason(text, expected):
    identity = identify(text, secret=SECRET)
    assert identity == Identity(None, expected)
    assert identity.detail
    assert text[-22:] not in identity.detail or len(text) < 22


def test_a_signed_key_is_an_identity():
    assert identify(sign(KEY, SECRET, 60), 2, SECRET) == Identity(KEY, attempt=2)


def test_a_signed_key_where_none_is_wanted_is_no_run_of_that_name():
    """The scheduler would look for it under another name."""
    assert identify(sign(KEY, SECRET, 60)) == Identity(None, "unverifiable")
    assert identify("0/task/a~b").key == RecordKey("0", "task", "a~b")


def test_a_forgery_is_told_once_and_counted_each_time(caplog):
    recorder = Recorder()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            identity = identify(sign(KEY, OTHER_SECRET, 60), secret=SECRET)
            recorder.count_unkeyed(identity.reason, identity.detail)
    assert recorder.stats().unkeyed == {"forged": 5}
    assert len(caplog.records) == 1
    assert "not made with this secret" in caplog.text
    recorder.close()


# The flags


def options(*flags: str, environ: dict[str, str] | None = None) -> RecordingOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return RecordingOptions.from_args(
        parser.parse_args(["--enable-recording", *flags]), environ or {}
    )


def test_the_secret_comes_from_the_flag_or_the_environment():
    assert options().secret is None
    assert options("--recording-secret", SECRET).secret == SECRET
    assert options(environ={"RECORDER_SECRET": SECRET}).secret == SECRET
    assert "secret" not in repr(options("--recording-secret", SECRET).secret)
    assert SECRET not in repr(options("--recording-secret", SECRET))


def test_a_short_secret_is_refused_at_the_start(capsys):
    with pytest.raises(SystemExit):
        options("--recording-secret", "short")
    assert "at least 32" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"RECORDER_SECRET.*at least 32"):
        options(environ={"RECORDER_SECRET": "short"})
