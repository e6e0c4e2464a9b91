"""What several trainers ask of a row before they can take it."""

from __future__ import annotations

from recorder_core.errors import ExportError
from recorder_core.export.batch import Batch, Row


def trainable(row: Row) -> Row:
    """The row, if every token to be trained has one before it.

    Raises:
        ExportError: It begins with a sampled token.
    """
    if not row.prompt_length:
        raise ExportError(
            f"{row.experience.eid} has no prompt: nothing predicts its first token, which no "
            "trainer can train; begin it with the tokenizer's BOS"
        )
    return row


def advantage_of(row: Row) -> float:
    """The row's advantage.

    Raises:
        ExportError: It has none.
    """
    if row.advantage is None:
        raise ExportError(
            f"{row.experience.eid} has no advantage, which the trainer takes from here: "
            "call export.group_advantages(batch) first"
        )
    return row.advantage


def check_temperature(batch: Batch, temperature: float, config: str) -> None:
    """See that the trainer divides its logits by what the engine divided them by.

    Raises:
        ExportError: It does not.
    """
    sampled = batch.temperature
    if sampled is not None and sampled != temperature:
        raise ExportError(
            f"the batch was sampled at temperature {sampled:g}, the trainer computes its logprobs "
            f"at {temperature:g}: set {config}(temperature={sampled:g}) and name it here"
        )
