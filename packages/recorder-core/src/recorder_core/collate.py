"""Experiences as torch batches: padded (a row each) or packed (end to end).

A value always belongs to the token that it stands at: the logprob at a token's place is that
token's own, which the model's logits one place before predict. Nothing is truncated, recomputed
or made up: what is missing is 0 with a mask that says so, or an error.

Batches are made of `export.rows`, whose rules say what is trained. Experiences may be given as they
are: then all that was recorded is kept, whatever it means for a trainer's ratio.

This module needs torch: `pip install recorder-core[torch]`. Images and the like
(`Experience.multi_modal_inputs`) and sampling masks, of which each token has another number of ids,
are not collated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from recorder_core.arrays import AnyArray, BoolArray
from recorder_core.errors import CollateError, ExportError
from recorder_core.experience import EID, Experience
from recorder_core.export.batch import Batch as Rows
from recorder_core.export.batch import Row
from recorder_core.export.normal import named, rows
from recorder_core.export.packing import pack
from recorder_core.export.rules import Rules
from recorder_core.records import RoutedExperts

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError(
        "recorder_core.collate needs torch, which is not installed: "
        'pip install "recorder-core[torch]"'
    ) from error

MissingLogprobs = Literal["error", "mask"]
Source = Iterable[Experience] | Rows
"""What is collated: experiences as they are, or rows that `export.rows` made of them."""

_AS_RECORDED = Rules(
    implausible_logprobs="keep",
    inexact_logprobs="keep",
    constrained="keep",
    biased="keep",
    forced_tokens="keep",
    aborted="keep",
    empty="keep",
    missing_reward="keep",
    multi_modal="keep",
    reward="last",  # not used: each keeps its own
    mixed_adapters="keep",
    mixed_temperatures="keep",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """What padded and packed batches have in common.

    In the shapes, `T` stands for the tokens and `R` for the response region: `[batch, width]`
    and `[batch, max_response]` in a `PaddedBatch`, both `[total]` in a `PackedBatch`.
    """

    eids: list[EID]
    """The identity of each sequence."""
    adapters: list[str | None]
    """The LoRA adapter that sampled each sequence."""
    tokens: torch.Tensor
    """int64 T (embedding layers and `gather` take int64 indices)."""
    position_ids: torch.Tensor
    """int64 T: 0 at a sequence's first token and at padding."""
    prompt_lengths: torch.Tensor
    """int64 [batch]: tokens of each first prompt."""
    action_mask: torch.Tensor
    """bool R: the model sampled the token and it is to be trained; each has a logprob."""
    logprobs: torch.Tensor
    """float32 R: the engine's logprob; 0.0 where `logprobs_valid` is False, never NaN."""
    logprobs_valid: torch.Tensor
    """bool R: the engine gave a logprob, whether the token is trained here or elsewhere."""
    rewards: torch.Tensor | None
    """float32 [batch]; None if some experience has none and none was required."""
    token_level_rewards: torch.Tensor | None
    """float32 R, 0.0 where none was given; None if no experience has any."""
    advantages: torch.Tensor | None
    """float32 R: the experiences' own, else those of `export.group_advantages`; None if neither."""
    returns: torch.Tensor | None
    """float32 R; None if no experience has any."""
    teacher_logprobs: torch.Tensor | None
    """float32 R; None if no experience has any."""
    version_index: torch.Tensor
    """int32 R: where `versions` has the weights that sampled the token; -1: nobody or unknown."""
    versions: list[str]
    """The weight version labels of the batch, in order of first appearance."""
    routed_experts: torch.Tensor | None
    """[..., layers, top_k], uint8; int32 if any is uint16, which torch cannot compute with.

    The row at a token's place is its routing, when it predicted the next token. A sequence's
    last token has none: `[batch, width - 1]` rows padded; `[total]` packed, that row not valid.
    """
    routed_valid: torch.Tensor | None
    """bool, a value per row of `routed_experts`: the engine gave the row; the others are 0."""

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.eids)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same batch with every tensor on `device`."""
        moved: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, torch.Tensor):
                moved[each.name] = value.to(device, non_blocking=non_blocking)
        return replace(self, **moved)


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedBatch(Batch):
    """A row per experience: prompts padded on the left, responses on the right.

    Every prompt ends, and every response begins, at column `prompt_length`, so that
    `tokens[:, prompt_length:]` is parallel to the response region's tensors. `width` is
    `prompt_length + max_response`.
    """

    prompt_length: int
    """Tokens of the longest prompt."""
    attention_mask: torch.Tensor
    """bool [batch, width]: False at padding."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedBatch(Batch):
    """All experiences end to end, without padding, as variable-length attention takes them.

    Every per-token tensor is [total] long and its value at index `i` belongs to `tokens[i]`;
    prompt tokens have action mask False, logprob 0.0 (not valid) and version index -1.
    """

    cu_seqlens: torch.Tensor
    """int32 [batch + 1]: sequence `i` is `[cu_seqlens[i], cu_seqlens[i + 1])`."""
    max_seqlen: int
    """Tokens of the longest sequence."""


def collate_padded(
    experiences: Source,
    *,
    pad_token_id: int,
    missing_logprobs: MissingLogprobs = "error",
    require_rewards: bool = True,
) -> PaddedBatch:
    """Put experiences into one padded batch.

    An experience without an action mask counts as sampled throughout its response region.
    `advantages`, `returns` and `teacher_logprobs` are given by all experiences or by none;
    where one has no token-level rewards, they are 0.

    Args:
        experiences: At least one, of any lengths and adapters; or a batch of `export.rows`.
        pad_token_id: The token at padding; masked out everywhere.
        missing_logprobs: What to do with a token to be trained that has no finite logprob: `error`,
            or `mask` to take it out of the action mask. In rows that is decided.
        require_rewards: Refuse an experience without a finite reward; if False, `rewards` is
            None as soon as one has none.

    Returns:
        The batch, on the CPU.

    Raises:
        CollateError: There are no experiences, one has no tokens, or they do not go together;
            it names the experiences.

    Example:
        >>> batch = collate_padded(experiences, pad_token_id=tokenizer.pad_token_id).to("cuda")
        >>> logits = model(batch.tokens, batch.attention_mask, batch.position_ids).logits
        >>> responses = batch.tokens[:, batch.prompt_length :]  # parallel to batch.logprobs
    """
    batch = _checked(experiences, missing_logprobs)
    prompt_length = max(each.prompt_length for each in batch)
    max_response = max(each.response_length for each in batch)
    width = prompt_length + max_response
    margins = [prompt_length - each.prompt_length for each in batch]
    layout = _Layout(
        tokens=_Places((len(batch), width), [i * width + m for i, m in enumerate(margins)]),
        responses=_Places(
            (len(batch), max_response), [i * max_response for i in range(len(batch))]
        ),
        rows=_Places((len(batch), width - 1), [i * (width - 1) + m for i, m in enumerate(margins)]),
    )
    return PaddedBatch(
        prompt_length=prompt_length,
        attention_mask=layout.tokens.lay([_ones(len(each.tokens)) for each in batch], np.bool_),
        **_columns(batch, layout, require_rewards, pad_token_id),
    )


def collate_packed(
    experiences: Source,
    *,
    missing_logprobs: MissingLogprobs = "error",
    require_rewards: bool = True,
) -> PackedBatch:
    """Put experiences into one packed batch; the rules are those of `collate_padded`.

    Args:
        experiences: As for `collate_padded`.
        missing_logprobs: As for `collate_padded`.
        require_rewards: As for `collate_padded`.

    Returns:
        The batch, on the CPU.

    Raises:
        CollateError: As for `collate_padded`.
    """
    return _packed(_checked(experiences, missing_logprobs), require_rewards)


def collate_packs(
    experiences: Source,
    *,
    token_budget: int,
    ranks: int = 1,
    missing_logprobs: MissingLogprobs = "error",
    require_rewards: bool = True,
) -> list[list[PackedBatch]]:
    """Put experiences into packed batches of bounded length, evenly over data-parallel ranks.

    Every rank gets as many packs, with about as many tokens: see `export.packing.pack`. Positions
    begin anew at each sequence. A mean over a pack is not one over the batch: divide each pack's
    sum by the batch's trained tokens.

    Args:
        experiences: As for `collate_padded`.
        token_budget: Tokens that a pack may have.
        ranks: Data-parallel ranks.
        missing_logprobs: As for `collate_padded`.
        require_rewards: As for `collate_padded`.

    Returns:
        For each rank its batches, on the CPU.

    Raises:
        CollateError: As for `collate_padded`, or a sequence is longer than the budget, or the
            ranks cannot share the sequences evenly.
    """
    batch = _checked(experiences, missing_logprobs)
    with _collating():
        dealt = pack([row.length for row in batch], token_budget, ranks=ranks)
    return [
        [_packed([batch[index] for index in each], require_rewards) for each in packs]
        for packs in dealt
    ]


def _packed(batch: list[Row], require_rewards: bool) -> PackedBatch:
    lengths = [len(each.tokens) for each in batch]
    bounds = np.cumsum([0, *lengths])
    starts = [int(bound) for bound in bounds[:-1]]
    whole = _Places((int(bounds[-1]),), starts)
    after_prompts = [s + each.prompt_length for s, each in zip(starts, batch, strict=True)]
    layout = _Layout(tokens=whole, responses=_Places(whole.shape, after_prompts), rows=whole)
    return PackedBatch(
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(lengths),
        **_columns(batch, layout, require_rewards),
    )


@dataclass(frozen=True)
class _Places:
    """Where the values of each experience go in one tensor."""

    shape: tuple[int, ...]
    starts: list[int]
    """The place of each experience's first value, in the flattened tensor."""

    def lay(
        self, parts: Sequence[AnyArray | None], dtype: npt.DTypeLike, fill: float = 0
    ) -> torch.Tensor:
        flat = np.full(math.prod(self.shape), fill, dtype=dtype)
        for start, part in zip(self.starts, parts, strict=True):
            if part is not None:
                flat[start : start + len(part)] = part
        return torch.from_numpy(flat.reshape(self.shape))

    def lay_known(self, parts: Sequence[AnyArray | None]) -> torch.Tensor:
        """As float32, with 0 for NaN: in a masked sum, NaN times 0 would be NaN."""
        laid = self.lay(parts, np.float32)
        return laid.masked_fill_(laid.isnan(), 0.0)


@dataclass(frozen=True)
class _Layout:
    """All that tells a padded batch from a packed one."""

    tokens: _Places
    responses: _Places
    rows: _Places


def _columns(
    batch: list[Row],
    layout: _Layout,
    require_rewards: bool,
    pad_token_id: int = 0,
) -> dict[str, Any]:
    """The fields of `Batch`."""
    experiences = [row.experience for row in batch]
    masks = [_response(row, row.mask) for row in batch]
    version_index, versions = _versions(experiences)
    routed_experts, routed_valid = _routed(experiences, layout.rows)

    def optional(name: str) -> torch.Tensor | None:
        return _optional(experiences, name, masks, layout.responses)

    advantages = optional("advantages")
    if advantages is None and batch[0].advantage is not None:
        run_wide = [
            mask * np.float32(row.advantage or 0) for row, mask in zip(batch, masks, strict=True)
        ]
        advantages = layout.responses.lay(run_wide, np.float32)
    return {
        "eids": [each.eid for each in experiences],
        "adapters": [each.adapter for each in experiences],
        "tokens": layout.tokens.lay([row.tokens for row in batch], np.int64, pad_token_id),
        "position_ids": layout.tokens.lay([np.arange(row.length) for row in batch], np.int64),
        "prompt_lengths": torch.tensor([row.prompt_length for row in batch]),
        "action_mask": layout.responses.lay(masks, np.bool_),
        "logprobs": layout.responses.lay(
            [_response(row, row.logprobs) for row in batch], np.float32
        ),
        "logprobs_valid": layout.responses.lay(
            [_finite(e.logprobs) for e in experiences], np.bool_
        ),
        "rewards": _rewards(batch, require_rewards),
        "token_level_rewards": optional("token_level_reward"),
        "advantages": advantages,
        "returns": optional("returns"),
        "teacher_logprobs": optional("teacher_logprobs"),
        "version_index": layout.responses.lay(version_index, np.int32, -1),
        "versions": versions,
        "routed_experts": routed_experts,
        "routed_valid": routed_valid,
    }


def _response(row: Row, values: AnyArray) -> AnyArray:
    return values[row.prompt_length :]


def _finite(logprobs: AnyArray | None) -> AnyArray | None:
    return None if logprobs is None else np.isfinite(logprobs)


def _ones(count: int) -> BoolArray:
    return np.ones(count, dtype=np.bool_)


@contextmanager
def _collating() -> Iterator[None]:
    """What the rows refuse is refused here as well."""
    try:
        yield
    except ExportError as error:
        raise CollateError(str(error)) from None


def _checked(source: Source, missing_logprobs: MissingLogprobs) -> list[Row]:
    if isinstance(source, Rows):
        batch = list(source.rows)
    else:
        with _collating():
            made = rows(source, replace(_AS_RECORDED, missing_logprobs=missing_logprobs))
        # Here a trajectory keeps a reward of its own, whatever its run's others have.
        batch = [replace(row, reward=row.experience.reward) for row in made]
    if not batch:
        raise CollateError("no experiences to collate; a batch holds at least one")
    empty = [row.experience.eid for row in batch if not row.length]
    if empty:
        raise CollateError(f"experiences without any token: {named(empty)}")
    return batch


def _rewards(batch: list[Row], require: bool) -> torch.Tensor | None:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        rewards = np.array(
            [np.nan if each.reward is None else each.reward for each in batch], dtype=np.float64
        ).astype(np.float32)
    lacking = [batch[i].experience.eid for i in np.flatnonzero(~np.isfinite(rewards))]
    if lacking and require:
        raise CollateError(
            f"experiences without a finite reward: {named(lacking)}; give them one, or pass "
            "require_rewards=False"
        )
    return None if lacking else torch.from_numpy(rewards)


def _optional(
    batch: list[Experience], name: str, masks: Sequence[BoolArray], places: _Places
) -> torch.Tensor | None:
    """A field that experiences may lack; NaN may stand at untrained tokens only."""
    values = [getattr(each, name) for each in batch]
    lacking = [e.eid for e, value in zip(batch, values, strict=True) if value is None]
    if len(lacking) == len(batch):
        return None
    if lacking and name != "token_level_reward":
        raise CollateError(f"some experiences have {name}, these have not: {named(lacking)}")
    unknown = [
        each.eid
        for each, value, mask in zip(batch, values, masks, strict=True)
        if value is not None and np.isnan(value[mask]).any()
    ]
    if unknown:
        raise CollateError(f"{name} is NaN at tokens to be trained: {named(unknown)}")
    return places.lay_known(values)


def _versions(batch: list[Experience]) -> tuple[list[AnyArray], list[str]]:
    places: dict[str, int] = {}
    parts: list[AnyArray] = []
    for each in batch:
        part = np.full(each.response_length, -1, dtype=np.int32)
        for start, end, version in each.model_versions:
            part[start:end] = places.setdefault(version, len(places))
        parts.append(part)
    return parts, list(places)


def _routed(
    batch: list[Experience], rows: _Places
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """The routed experts and which rows are valid; only valid rows are copied."""
    found: list[tuple[int, RoutedExperts]] = []
    shapes: dict[tuple[int, ...], EID] = {}
    for start, each in zip(rows.starts, batch, strict=True):
        if each.routed_experts is not None and len(each.routed_experts.data):
            found.append((start, each.routed_experts))
            shapes.setdefault(each.routed_experts.data.shape[1:], each.eid)
    if not found:
        return None, None
    if len(shapes) > 1:
        which = [f"{list(shape)} in {eid}" for shape, eid in shapes.items()]
        raise CollateError(f"routed experts have different [layers, top_k]: {named(which)}")
    shape = next(iter(shapes))
    wide = any(routed.data.dtype != np.uint8 for _, routed in found)
    count = math.prod(rows.shape)
    data = np.zeros((count, *shape), dtype=np.int32 if wide else np.uint8)
    valid = np.zeros(count, dtype=np.bool_)
    for start, routed in found:
        for begin, end in routed.valid_ranges:
            place = slice(start + begin, start + end)
            data[place] = routed.data[begin - routed.start : end - routed.start]
            valid[place] = True
    return (
        torch.from_numpy(data.reshape(*rows.shape, *shape)),
        torch.from_numpy(valid.reshape(rows.shape)),
    )
