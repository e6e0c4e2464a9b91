"""The bytes of tokens, from real tokenizers."""

from __future__ import annotations

import pytest

from recorder_core.view.pieces import NoPiecesError, pieces_of

tokenizers = pytest.importorskip("tokenizers")

TEXT = "Grüße 🤖 日本 مرحبا a\tb\n"
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=ALPHABET, special_tokens=["<|end|>", "<Ġ>"]
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    return made


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_a_text_s_tokens_are_its_own(make):
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(pieces_of(tokenizer, ids)) == TEXT.encode()


def test_a_special_token_is_its_own_name():
    assert pieces_of(byte_level(), [0, 1]) == [b"<|end|>", "<Ġ>".encode()]


def test_an_id_beyond_the_vocabulary_has_no_bytes():
    assert pieces_of(byte_level(), [1_000_000]) == [b""]


def test_what_is_no_such_tokenizer_is_named():
    with pytest.raises(NoPiecesError, match="no tokenizer is loaded"):
        pieces_of(None, [1])
    with pytest.raises(NoPiecesError, match="is a dict"):
        pieces_of({}, [1])
    wordy = tokenizers.Tokenizer(tokenizers.models.WordPiece())
    wordy.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(NoPiecesError, match="how the tokenizer spells bytes"):
        pieces_of(wordy, [1])
