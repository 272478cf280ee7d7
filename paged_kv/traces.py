# Exported from book/labs/L4_eviction_and_radix.py by tools/export.py; edit the chapter, not this file.
"""Requests as others recorded them: readers of two public formats, strict about every line.

Sources of the formats: github.com/kvcache-ai/Mooncake (FAST25-release/traces) and
github.com/Azure/AzurePublicDataset (AzureLLMInferenceTrace).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from typing import Any

import numpy as np

BLOCK_TOKENS = 512  # a block of the Mooncake format
MAX_LENGTH = 2**31 - 1  # tokens; a longer request is a broken line
MAX_ID = 2**63 - 1


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    arrival_s      seconds since the trace began.
    input_length   tokens of the prompt, at least 1.
    output_length  tokens generated; 0 occurs, where a request was refused or cut off.
    prefix_ids     one id a prompt block of BLOCK_TOKENS tokens, the last may be partly filled;
                   two requests with the same id at an index share all tokens up to its end.
                   Empty where the trace does not tell.
    """

    arrival_s: float
    input_length: int
    output_length: int
    prefix_ids: tuple[int, ...] = ()


def read_mooncake(path: str | PathLike[str]) -> Iterator[TraceRequest]:
    """Requests of a JSONL file with timestamp (ms), input_length, output_length, hash_ids.

    Yields TraceRequest in the order of the file, which must be that of arrival.  Reads line by
    line; remembers one parent for each id.
    Raises: ValueError that names line and field, for whatever is missing, of another type, out
    of range, earlier than the line before; for a number of ids that does not fit the length,
    an id twice in one prompt, or one that stands behind two different openings.
    """
    before = 0.0
    parents: dict[int, int] = {}  # of each id seen, the one before it, -1 at the start
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            fields = _json_object(number, line)
            request = TraceRequest(
                _number(number, fields, "timestamp") / 1000,
                _length(number, fields, "input_length", 1),
                _length(number, fields, "output_length", 0),
                _ids(number, fields),
            )
            _check_order(number, "timestamp", before, request.arrival_s)
            _check_chain(number, request, parents)
            before = request.arrival_s
            yield request


def _refuse(line: int, field: str, what: str) -> ValueError:
    return ValueError(f"line {line}, {field}: {what}")


def _json_object(line: int, text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refuse(line, "(whole line)", f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _refuse(line, "(whole line)", f"a JSON object is needed, not {type(fields).__name__}")
    return fields


def _field(line: int, fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise _refuse(line, name, "missing")
    return fields[name]


def _number(line: int, fields: dict[str, Any], name: str) -> float:
    value = _field(line, fields, name)
    if type(value) not in (int, float) or not 0 <= value <= MAX_ID:
        raise _refuse(line, name, f"{value!r:.40}, but a number of at least 0 is needed")
    return float(value)


def _length(line: int, fields: dict[str, Any], name: str, least: int) -> int:
    value = _field(line, fields, name)
    if type(value) is not int or not least <= value <= MAX_LENGTH:
        raise _refuse(line, name, f"{value!r:.40}, but {least} to {MAX_LENGTH} tokens are possible")
    return value


def _ids(line: int, fields: dict[str, Any]) -> tuple[int, ...]:
    ids = _field(line, fields, "hash_ids")
    if not isinstance(ids, list):
        raise _refuse(line, "hash_ids", f"{ids!r:.40}, but a list is needed")
    for value in ids:
        if type(value) is not int or not 0 <= value <= MAX_ID:
            raise _refuse(line, "hash_ids", f"{value!r:.40}, but ids are 0 to {MAX_ID}")
    return tuple(ids)


def _check_order(line: int, field: str, before: float, now: float) -> None:
    if now < before:
        raise _refuse(line, field, f"{now} s, but the line before has {before} s")


def _check_chain(line: int, request: TraceRequest, parents: dict[int, int]) -> None:
    ids, blocks = request.prefix_ids, -(-request.input_length // BLOCK_TOKENS)
    if len(ids) != blocks:
        said = f"{len(ids)} ids, but {request.input_length} tokens are {blocks} blocks"
        raise _refuse(line, "hash_ids", said)
    if len(set(ids)) != blocks:
        raise _refuse(line, "hash_ids", "an id stands twice in one prompt")
    for parent, own in itertools.pairwise((-1, *ids)):
        if parents.setdefault(own, parent) != parent:
            raise _refuse(line, "hash_ids", f"id {own} follows {parents[own]} and {parent}")


AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def read_azure(path: str | PathLike[str]) -> Iterator[TraceRequest]:
    """Requests of an Azure LLM inference trace: CSV of time stamp, prompt and output tokens.

    Yields TraceRequest without prefix_ids; arrival_s counts from the first line.
    Raises: ValueError that names line and field, as `read_mooncake`.
    """
    start, before = None, 0.0
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                if line.strip() != AZURE_HEADER:
                    raise _refuse(1, "(header)", f"{line.strip()!r:.60}, not {AZURE_HEADER}")
                continue
            parts = line.strip().split(",")
            if len(parts) != 3:
                raise _refuse(number, "(whole line)", f"{len(parts)} fields, but 3 are needed")
            moment = _moment(number, parts[0])
            start = moment if start is None else start
            arrival = _seconds(number, start, moment)
            _check_order(number, "TIMESTAMP", before, arrival)
            before = arrival
            prompt = _digits(number, "ContextTokens", parts[1], 1)
            yield TraceRequest(arrival, prompt, _digits(number, "GeneratedTokens", parts[2], 0))


def _moment(line: int, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise _refuse(line, "TIMESTAMP", f"{text!r:.40} is not a date and time") from None


def _seconds(line: int, start: datetime, moment: datetime) -> float:
    if (start.tzinfo is None) != (moment.tzinfo is None):
        raise _refuse(line, "TIMESTAMP", f"{moment}: with a time zone here, without in line 2")
    return (moment - start).total_seconds()


def _digits(line: int, field: str, text: str, least: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else -1
    if not least <= value <= MAX_LENGTH:
        raise _refuse(line, field, f"{text!r:.40}, but {least} to {MAX_LENGTH} tokens are possible")
    return value


@dataclass(frozen=True)
class TraceStats:
    """What a trace looks like before any cache has seen it; blocks are those of prefix_ids.

    requests_per_s, mean_input, mean_output (tokens), sigma_input and sigma_output (standard
    deviation of the logarithm; outputs of 0 left out), blocks (entries of all prompts),
    distinct (different ids), reusable (share of the entries whose id had come before: what an
    unlimited cache hits), used_once (share of the ids that come once), top_uses (of the id
    that comes most often).
    """

    requests: int
    requests_per_s: float
    mean_input: float
    sigma_input: float
    mean_output: float
    sigma_output: float
    blocks: int
    distinct: int
    reusable: float
    used_once: float
    top_uses: int


def trace_stats(requests: Iterable[TraceRequest]) -> TraceStats:
    """Count a trace.  Raises ValueError for one without a request."""
    trace = list(requests)
    if not trace:
        raise ValueError("requests: an empty trace has no statistics")
    inputs = np.array([request.input_length for request in trace], float)
    outputs = np.array([request.output_length for request in trace], float)
    uses = Counter(block for request in trace for block in request.prefix_ids)
    blocks, seconds = uses.total(), trace[-1].arrival_s - trace[0].arrival_s
    return TraceStats(
        requests=len(trace),
        requests_per_s=len(trace) / seconds if seconds else math.inf,
        mean_input=float(inputs.mean()),
        sigma_input=float(np.log(inputs).std()),
        mean_output=float(outputs.mean()),
        sigma_output=float(np.log(outputs[outputs > 0]).std()) if outputs.any() else 0.0,
        blocks=blocks,
        distinct=len(uses),
        reusable=1 - len(uses) / blocks if blocks else 0.0,
        used_once=sum(n == 1 for n in uses.values()) / len(uses) if uses else 0.0,
        top_uses=max(uses.values(), default=0),
    )
