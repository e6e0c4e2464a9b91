"""What tokens are as bytes, read from a tokenizer's vocabulary.

A token need not be whole characters, so that its text alone is not known: bytes are, and whoever
shows them decodes the bytes of neighbours together. Nothing is decoded here, for another reason
too: an engine's threads use the same tokenizer, and its decoder lets go of the interpreter's lock
while it holds what they want to change. A look at the vocabulary does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from recorder_core.errors import RecorderError
from recorder_core.protocol import MAX_PIECES

Pieces = Callable[[Sequence[int]], list[bytes]]
"""The bytes of each token id; empty for an id that has none."""


class NoPiecesError(RecorderError):
    """The bytes of tokens are not known."""


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """The bytes of token ids.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or one of transformers that is made of it.
        ids: Token ids.

    Returns:
        Bytes of each; empty where the vocabulary has no such id.

    Raises:
        NoPiecesError: There is no tokenizer, or how it spells bytes is not known.
    """
    if tokenizer is None:
        raise NoPiecesError("no tokenizer is loaded here")
    # Of transformers' own; a wrapper may hide what it wraps.
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    try:
        spelling = bytes(backend.decoder.__getstate__())
        added = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
        spelled = [None if id_ in added else backend.id_to_token(id_) for id_ in ids]
    except AttributeError as error:
        raise NoPiecesError(
            f"the tokenizer is a {type(tokenizer).__name__}, whose vocabulary is not known here "
            f"({error})"
        ) from None
    read = _reader(spelling)
    return [
        added[id_].encode(errors="replace") if id_ in added else read(text) if text else b""
        for id_, text in zip(ids, spelled, strict=True)
    ]


def known_pieces(pieces: Pieces, ids: Iterable[int]) -> dict[int, bytes]:
    """The bytes of any number of token ids, by id.

    Raises:
        NoPiecesError: They are not known.
    """
    wanted, known = sorted(ids), dict[int, bytes]()
    for at in range(0, len(wanted), MAX_PIECES):
        part = wanted[at : at + MAX_PIECES]
        known.update(zip(part, pieces(part), strict=True))
    return known


def pieces_from(tokenizer: str) -> Pieces:
    """The bytes of tokens, from a tokenizer's file.

    Args:
        tokenizer: A folder with a `tokenizer.json`, or that file.

    Raises:
        RecorderError: It cannot be read.
    """
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        import tokenizers  # of an extra

        return functools.partial(pieces_of, tokenizers.Tokenizer.from_file(str(path)))
    except ImportError as error:
        raise RecorderError(f"--tokenizer: {error}; pip install tokenizers") from None
    except Exception as error:
        raise RecorderError(f"--tokenizer: {path} cannot be read: {error}") from error


def _reader(decoder: bytes) -> Callable[[str], bytes]:
    """How a vocabulary spells bytes, by the decoder that goes with it, as JSON."""
    if b'"ByteLevel"' in decoder:
        return _byte_level
    if b'"ByteFallback"' in decoder or b'"Metaspace"' in decoder:
        return _sentence_piece
    raise NoPiecesError(f"how the tokenizer spells bytes is not known (its decoder: {decoder!r})")


@functools.cache
def _bytes_by_letter() -> dict[str, int]:
    """The alphabet of byte-level vocabularies.

    Printable bytes stand for themselves, the others for the letters from U+0100 on: see
    `bytes_to_unicode` of OpenAI's GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def _byte_level(text: str) -> bytes:
    letters = _bytes_by_letter()
    try:
        return bytes(letters[letter] for letter in text)
    except KeyError:
        return text.encode(errors="replace")  # a token that was put in as it is


def _sentence_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode(errors="replace")
