"""From experiences to the normal form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recorder_core.errors import ExportError
from recorder_core.experience import Experience
from recorder_core.export.batch import Batch, Row, Run, Status
from recorder_core.export.report import Report
from recorder_core.export.rules import Rules
from recorder_core.keys import RecordKey
from recorder_core.records import FinishReason, Sampling

Mask = npt.NDArray[np.bool_]

_AT_TEMPERATURE = frozenset({"processed_logprobs", "temperature_logprobs"})
"""Modes of vLLM and of SGLang whose logprobs are those of the softmax at the temperature."""
_ALL_TOKENS = 1 << 30
"""SGLang's `top_k` for no limit."""

_FLAGS = {
    "logprobs_implausible": "implausible_logprobs",
    "constrained": "constrained",
    "biased": "biased",
    "forced_tokens": "forced_tokens",
}
"""Flags of a generation and the rules that answer them."""

_REFUSALS = {
    "missing_logprobs": (
        "tokens to be trained have no logprob",
        "missing_logprobs='mask' leaves these tokens out",
    ),
    "implausible_logprobs": (
        "logprobs that cannot be (all zero, positive, or endlessly small)",
        "implausible_logprobs='mask' leaves these generations out",
    ),
    "inexact_logprobs": (
        "the logprobs are not those of the plain softmax that a trainer recomputes",
        "start vLLM with --logprobs-mode processed_logprobs and sample with top_p=1, top_k=0, "
        "min_p=0; or inexact_logprobs='mask' leaves these generations out, 'keep' trains them",
    ),
    "constrained": (
        "sampled under a grammar, so that the logprobs are not those of the model alone",
        "constrained='mask' leaves these generations out, 'keep' trains them",
    ),
    "biased": (
        "sampled with penalties or biases, so that the logprobs are not those of the model alone",
        "biased='mask' leaves these generations out, 'keep' trains them",
    ),
    "forced_tokens": (
        "the engine put in tokens that nobody sampled",
        "forced_tokens='mask' leaves these generations out",
    ),
    "aborted": ("the last generation was aborted", "aborted='drop' leaves these out"),
    "truncated": ("the last generation met its token limit", "truncated='drop' leaves these out"),
    "incomplete": ("the run is not recorded whole", "incomplete='drop' leaves these out"),
    "empty": ("nothing is to be trained", "empty='drop' leaves these out"),
    "missing_reward": (
        "no trajectory of the run has a finite reward",
        "reward the runs, or missing_reward='drop' leaves these out",
    ),
    "multi_modal": (
        "token ids alone are not what the model saw: there are images or the like",
        "multi_modal='drop' leaves these out, 'keep' gives their placeholder tokens",
    ),
    "reward": (
        "the trajectories of one run have different rewards",
        "reward='mean', 'max' or 'last' makes one of them",
    ),
    "mixed_adapters": (
        "several LoRA adapters in one batch",
        "export each adapter's experiences on their own, or pass mixed_adapters='keep'",
    ),
    "mixed_temperatures": (
        "several temperatures in one batch",
        "sample at one, or pass mixed_temperatures='keep'",
    ),
    "stale": (
        "max_staleness is set, and the version of trained tokens is not known",
        "set labels such as '12' on the engine, or pass version=a function that makes a label a "
        "number",
    ),
}
"""What is wrong, and the way out."""


def rows(
    experiences: Iterable[Experience],
    rules: Rules | None = None,
    *,
    incomplete: Iterable[RecordKey | str] = (),
) -> Batch:
    """Put experiences into the normal form that every exporter starts from.

    Nothing is truncated, recomputed or made up. What the rules take out is counted in
    `Batch.report`; a run all of whose trajectories are left out still counts in the baseline.

    Args:
        experiences: Of any runs, each trajectory once; all those of a run together.
        rules: What to do with what cannot or should not be trained; the default refuses whatever
            could be wrong in silence.
        incomplete: Keys of the runs that are known not to be recorded whole.

    Returns:
        A row per trajectory that is not left out, in the order given.

    Raises:
        ExportError: A rule refuses; it names the experiences and the way out.

    Example:
        >>> batch = export.rows(drained.experiences, export.Rules(aborted="mask"))
        >>> batch = export.group_advantages(batch)
        >>> batch.report.dropped
        Counter({'empty': 1})
    """
    return _Normalizer(rules or Rules(), incomplete).batch(list(experiences))


class _Turn(NamedTuple):
    """A generation on a trajectory, as far as the rules look at it."""

    tokens: slice
    """Its sampled tokens, in the whole sequence."""
    sampling: Sampling
    flags: Sequence[str]


class _Refusals:
    """What the rules refuse, collected over the whole batch: one error names it all."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)

    def add(self, rule: str, name: str) -> None:
        self._found[rule].append(name)

    def check(self) -> None:
        """Raise ExportError if there are any."""
        if self._found:
            raise ExportError(". ".join(self._sentence(*each) for each in self._found.items()))

    def _sentence(self, rule: str, names: list[str]) -> str:
        wrong, way_out = _REFUSALS[rule]
        return f"{wrong}: {named(names)}; {way_out}"


def named(names: Sequence[object]) -> str:
    """The first names of a list that may be a whole batch long."""
    more = len(names) - 5
    return ", ".join(map(str, names[:5])) + (f" and {more} more" if more > 0 else "")


class _Normalizer:
    """One call of `rows`."""

    def __init__(self, rules: Rules, incomplete: Iterable[RecordKey | str]) -> None:
        self._rules = rules
        self._incomplete = {str(key) for key in incomplete}
        self._report = Report()
        self._refusals = _Refusals()
        self._versions: dict[str, int] = {}

    def batch(self, experiences: list[Experience]) -> Batch:
        keys = [each.eid.key.text for each in experiences]
        runs = self._runs(keys, experiences)
        self._report.experiences, self._report.runs = len(experiences), len(runs)
        made: list[Row] = []
        indices: dict[str, int] = defaultdict(int)
        for key, each in zip(keys, experiences, strict=True):
            row = self._row(each, runs[key], indices[key])
            if row is not None:
                indices[key] += 1
                made.append(row)
        self._check_uniform(made)
        self._refusals.check()
        self._report.rows = len(made)
        self._report.trained_tokens = sum(row.trained_tokens for row in made)
        return Batch(tuple(made), runs, self._report)

    def _runs(self, keys: list[str], experiences: list[Experience]) -> dict[str, Run]:
        rewards: dict[str, list[float]] = {}
        groups: dict[str, str] = {}
        for key, each in zip(keys, experiences, strict=True):
            groups[key] = f"{each.eid.batch}/{each.eid.task}"
            given = rewards.setdefault(key, [])
            if each.reward is not None and _fits_float32(each.reward):
                given.append(each.reward)
        return {key: Run(key, groups[key], self._reward(key, rewards[key])) for key in rewards}

    def _reward(self, key: str, given: list[float]) -> float | None:
        if not given:
            return None
        if self._rules.reward == "same" and len(set(given)) > 1:
            self._refusals.add("reward", f"{key} {sorted(set(given))}")
        if self._rules.reward == "mean":
            return sum(given) / len(given)
        return max(given) if self._rules.reward == "max" else given[-1]

    def _row(self, experience: Experience, run: Run, index: int) -> Row | None:
        """One trajectory's row; None if it is left out or refused."""
        start, length = experience.prompt_length, len(experience.tokens)
        mask = np.zeros(length, dtype=np.bool_)
        mask[start:] = True if experience.action_mask is None else experience.action_mask
        sampled = int(np.count_nonzero(mask))
        self._report.sampled_tokens += sampled
        logprobs = np.zeros(length, dtype=np.float32)
        known = np.zeros(length, dtype=np.bool_)
        if experience.logprobs is not None:
            np.isfinite(experience.logprobs, out=known[start:])
            np.copyto(logprobs[start:], experience.logprobs, where=known[start:])
        versions = self._versions_of(experience)
        status = _status(experience)

        taken_out = self._take_row(experience, run, status)
        if taken_out:
            rule, policy = taken_out
            if policy == "drop":
                self._drop(rule, sampled)
                return None
            mask[:] = False
            self._report.masked_tokens[rule] += sampled
        else:
            self._take_generations(experience, mask)
            self._take_missing(experience, mask, known)
            if self._take_stale(experience, mask, versions):
                self._drop("stale", int(np.count_nonzero(mask)))
                return None
            if not mask.any() and not self._keeps("empty", experience):
                self._drop("empty", 0)
                return None
        return Row(
            experience=experience,
            tokens=experience.tokens,
            prompt_length=start,
            mask=mask,
            logprobs=logprobs,
            versions=versions,
            temperature=self._temperature(experience, mask),
            group=run.group,
            run=run.key,
            index=index,
            reward=run.reward,
            advantage=None,
            status=status,
        )

    def _drop(self, rule: str, tokens: int) -> None:
        self._report.dropped[rule] += 1
        self._report.dropped_tokens[rule] += tokens

    def _keeps(self, rule: str, experience: Experience) -> bool:
        policy: str = getattr(self._rules, rule)
        if policy == "error":
            self._refusals.add(rule, str(experience.eid))
        return policy in ("keep", "mask")

    def _take_row(self, experience: Experience, run: Run, status: Status) -> tuple[str, str] | None:
        """The first rule that takes the whole trajectory out, and whether by `drop` or `mask`."""
        applies = {
            "incomplete": run.key in self._incomplete,
            "aborted": status == "aborted",
            "truncated": status == "truncated",
            "missing_reward": run.reward is None,
            "multi_modal": _has_placeholders(experience),
        }
        for rule, does in applies.items():
            if does and not self._keeps(rule, experience):
                return rule, "drop"
            if does and getattr(self._rules, rule) == "mask":
                return rule, "mask"
        return None

    def _take_generations(self, experience: Experience, mask: Mask) -> None:
        """Mask the generations that a rule takes out, or refuse them."""
        for turn in _turns(experience):
            for rule in _broken(turn):
                policy: str = getattr(self._rules, rule)
                if policy == "keep":
                    continue
                if not (count := int(np.count_nonzero(mask[turn.tokens]))):
                    break
                if policy == "mask":
                    mask[turn.tokens] = False
                    self._report.masked_tokens[rule] += count
                else:
                    why = f" ({_described(turn.sampling)})" if rule == "inexact_logprobs" else ""
                    self._refusals.add(rule, f"{experience.eid}{why}")

    def _take_missing(self, experience: Experience, mask: Mask, known: Mask) -> None:
        wanted = int(np.count_nonzero(mask))
        np.logical_and(mask, known, out=mask)
        lacking = wanted - int(np.count_nonzero(mask))
        if lacking and self._rules.missing_logprobs == "error":
            self._refusals.add("missing_logprobs", f"{experience.eid} ({lacking} of {wanted})")
        elif lacking:
            self._report.masked_tokens["missing_logprobs"] += lacking

    def _take_stale(
        self, experience: Experience, mask: Mask, versions: npt.NDArray[np.int64]
    ) -> bool:
        """Whether the trajectory is to be dropped; stale tokens are masked if they are to be."""
        rules = self._rules
        if rules.max_staleness is None or not mask.any():
            return False
        assert rules.current is not None
        if versions[mask].min() < 0:
            self._refusals.add("stale", str(experience.eid))
            return False
        stale = mask & (versions < rules.current - rules.max_staleness)
        count = int(np.count_nonzero(stale))
        if not count or rules.stale == "drop":
            return bool(count)
        mask[stale] = False
        self._report.masked_tokens["stale"] += count
        return False

    def _versions_of(self, experience: Experience) -> npt.NDArray[np.int64]:
        versions = np.full(len(experience.tokens), -1, dtype=np.int64)
        for begin, end, label in experience.model_versions:
            if label not in self._versions:
                number = self._rules.version(label)
                self._versions[label] = -1 if number is None else number
            start = experience.prompt_length
            versions[start + begin : start + end] = self._versions[label]
        return versions

    def _temperature(self, experience: Experience, mask: Mask) -> float | None:
        found = {
            turn.sampling.temperature for turn in _turns(experience) if mask[turn.tokens].any()
        }
        if len(found) > 1 and self._rules.mixed_temperatures == "error":
            self._refusals.add("mixed_temperatures", f"{experience.eid} {found}")
        return found.pop() if len(found) == 1 else None

    def _check_uniform(self, made: list[Row]) -> None:
        trained = [row for row in made if row.mask.any()]
        if self._rules.mixed_adapters == "error":
            self._check_one("mixed_adapters", {row.experience.adapter: row for row in trained})
        if self._rules.mixed_temperatures == "error":
            self._check_one("mixed_temperatures", {row.temperature: row for row in trained})

    def _check_one(self, rule: str, examples: Mapping[object, Row]) -> None:
        if len(examples) > 1:
            for value, row in examples.items():
                self._refusals.add(rule, f"{value} in {row.experience.eid}")


def _fits_float32(value: float) -> bool:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
        return bool(np.isfinite(np.float32(value)))


def _status(experience: Experience) -> Status:
    if experience.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return "aborted"
    return "truncated" if experience.finish_reason is FinishReason.LENGTH else "completed"


def _has_placeholders(experience: Experience) -> bool:
    tokens = experience.tokens
    # Tinker's prompts have a negative id for each token of an image.
    return bool(experience.multi_modal_inputs) or (len(tokens) > 0 and bool(tokens.min() < 0))


def _turns(experience: Experience) -> Iterator[_Turn]:
    """The generations; an experience built by hand may have none: then it counts as one."""
    start = experience.prompt_length
    for turn in experience.turns:
        yield _Turn(slice(start + turn.start, start + turn.end), turn.sampling, turn.flags)
    if not experience.turns:
        yield _Turn(slice(start, len(experience.tokens)), experience.sampling, ())


def _broken(turn: _Turn) -> Iterator[str]:
    """The rules that a generation breaks."""
    for flag in turn.flags:
        if flag in _FLAGS:
            yield _FLAGS[flag]
    if not _is_exact(turn.sampling):
        yield "inexact_logprobs"


def _is_exact(sampling: Sampling) -> bool:
    """Whether logprobs are those of the plain softmax at the recorded temperature.

    What is not recorded counts as neutral: engines record it, programs that build experiences by
    hand need not.
    """
    mode, top_k = sampling.logprobs_mode or "", sampling.top_k or 0
    if mode.endswith("logits") or 0 < top_k < _ALL_TOKENS:
        return False
    if (sampling.top_p or 1.0) < 1.0 or sampling.min_p:
        return False
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    return temperature == 1.0 or (temperature > 0 and mode in _AT_TEMPERATURE)


def _described(sampling: Sampling) -> str:
    known = [sampling.logprobs_mode or "logprobs of an unknown mode"]
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = getattr(sampling, name)
        known += [] if value is None else [f"{name} {value:g}"]
    return ", ".join(known)
