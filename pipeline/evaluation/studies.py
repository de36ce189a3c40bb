"""Studies beside the check (`check.studies`): trees, acceptance rules, number of heads, batch
sizes.

    trees    plain, top-1 chain, Cartesian tree, the authors' stock tree, a searched one of its
             size, the export's own; see tree_studies.py
    typical  typical acceptance by eps, delta = sqrt(eps), and temperature, against greedy, sampling
    and rejection heads    the export's tree cut at each depth; see tree_studies.py batch
    sequences decoded at once, plain and with the tree load     vLLM as a server under load; see
    load_study.py, since another engine runs it

`trees` and `heads` cost a forward per prompt and a few steps per row. A row of `typical` decodes
`NUM_PROMPTS` prompts of at most `MAX_NEW_TOKENS` tokens once (twice where steps are captured); a
row of `batch` decodes the same prompts, repeated to fill a batch, `check.repeats` times (three
times more where steps are captured). The figures of a study are comparable with each other, not
with the check's own. Rows are flat dictionaries, for a table and a plot.

    acceleration rate  tokens kept / target forwards after the prefill, pooled over sequences
    overhead           seconds per step / seconds per plain step of the same prompts, in turns
    speedup            acceleration rate / overhead
    log-likelihood     nats per token of the answers under the target itself, at temperature 1
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import nan, sqrt
from time import perf_counter
from typing import Any, Literal

from pipeline.artifacts.tree_file import Calibration
from pipeline.config import CheckConfig, StudyName
from pipeline.decoding.acceptance import AcceptanceRule, acceptance_rule
from pipeline.decoding.cuda_graphs import WARM_UP_STEPS
from pipeline.decoding.decoder import Decoded, Decoder, acceleration_rate
from pipeline.evaluation.answers import mean_log_likelihood
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.speed import decode_by, rounded
from pipeline.evaluation.tree_studies import heads_used, tree_ladder
from pipeline.execution.progress import ProgressReporter

StudyRow = dict[str, Any]

NUM_PROMPTS, MAX_NEW_TOKENS = 8, 64
TEMPERATURES = (0.3, 0.7, 1.0)
EPS = (0.01, 0.04, 0.09, 0.16, 0.25)  # the range that the paper sweeps
BATCH_SIZES = (1, 2, 4, 8, 16)
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Side:
    """One row to measure."""

    name: str
    eps: float | None
    decoder: Decoder
    rule: AcceptanceRule


def run_studies(
    names: Collection[StudyName],
    plain: Decoder,
    accelerated: Decoder,
    prompts: Sequence[Prompt],
    settings: CheckConfig,
    calibration: Calibration | None,
    answers: Sequence[list[int]],
    progress: ProgressReporter | None = None,
) -> dict[str, list[StudyRow]]:
    """The rows of the named studies.

    Args:
        plain, accelerated: The check's decoders; the studies use their target, heads, tree and
        limits.
        prompts: At least one.
        settings: The check's: number of tokens, typical acceptance's first token, repetitions of
            batches.
        calibration: What calibrate found, for the searched tree of the stock tree's size; None
            leaves its row out.
        answers: Plain greedy decoding's answer to each prompt.
    """
    num_tokens = min(settings.max_new_tokens, MAX_NEW_TOKENS)
    few = prompts[:NUM_PROMPTS]
    studies: dict[StudyName, Callable[[], list[StudyRow]]] = {
        "trees": lambda: tree_ladder(plain, accelerated, prompts, answers, calibration),
        "typical": lambda: typical_sweep(plain, accelerated, few, num_tokens, settings.first_token),
        "heads": lambda: heads_used(plain, accelerated, prompts, answers),
        "batch": lambda: batch_sizes(plain, accelerated, few, num_tokens, settings.repeats),
    }
    rows: dict[str, list[StudyRow]] = {}
    asked = [name for name in studies if name in names]
    for name in asked:
        if progress:
            progress.begin("native", len(asked), done=len(rows), unit="studies")
        rows[name] = studies[name]()
    return rows


def typical_sweep(
    plain: Decoder,
    accelerated: Decoder,
    prompts: Sequence[Prompt],
    num_tokens: int,
    first_token: Literal["greedy", "sampled"],
) -> list[StudyRow]:
    """Typical acceptance over eps and temperature, with greedy decoding, plain sampling and
    rejection (2.3.1).

    Each speedup is over plain decoding at the same temperature.
    """
    rows = []
    for temperature in (0.0, *TEMPERATURES):
        sampling = acceptance_rule("rejection", temperature)  # at 0 it is greedy
        exact = "rejection" if temperature else "greedy"
        sides = [Side("plain", None, plain, sampling), Side(exact, None, accelerated, sampling)]
        for eps in EPS if temperature else ():
            rule = acceptance_rule("typical", temperature, eps, sqrt(eps), first_token=first_token)
            sides.append(Side("typical", eps, accelerated, rule))
        rows += [
            {"temperature": temperature} | row for row in _measured(sides, prompts, num_tokens)
        ]
    return rows


def batch_sizes(
    plain: Decoder, accelerated: Decoder, prompts: Sequence[Prompt], num_tokens: int, repeats: int
) -> list[StudyRow]:
    """Tokens per second of the same prompts in batches of 1 to 16, prefill included; medians of
    `repeats`.

    A power of two of the prompts is used, so that they fill every batch; they repeat where there
    are too few.
    """
    asked = [prompt.ids for prompt in prompts[: 1 << (len(prompts).bit_length() - 1)]]
    rows = []
    for size in BATCH_SIZES:
        texts = list(islice(cycle(asked), max(size, len(asked))))
        batches = [texts[start : start + size] for start in range(0, len(texts), size)]
        for decoder in (plain, accelerated):  # warm-up: every length and width must be captured
            for batch in batches * (WARM_UP_STEPS + 1) if decoder.captures else batches[:1]:
                decoder.generate_batch(batch, num_tokens if decoder.captures else WARM_UP_TOKENS)
        speeds: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            for decoder, rates in zip((plain, accelerated), speeds, strict=True):
                started = perf_counter()
                answers = [
                    answer
                    for batch in batches
                    for answer in decoder.generate_batch(batch, num_tokens)
                ]
                rates.append(
                    sum(len(answer.token_ids) for answer in answers) / (perf_counter() - started)
                )
        plainly, by_tree = map(statistics.median, speeds)
        rows.append(
            {
                "batch_size": size,
                "tokens_per_second": round(by_tree, 2),
                "baseline_tokens_per_second": round(plainly, 2),
                "speedup": round(by_tree / plainly, 4),
            }
        )
    return rows


def _measured(sides: Sequence[Side], prompts: Sequence[Prompt], num_tokens: int) -> list[StudyRow]:
    """Each side's row, relative to the first side, which is plain decoding; sides take turns for
    each prompt.

    A figure is None where no answer took a step.
    """
    answers: list[list[Decoded]] = [[] for _ in sides]
    for side in sides:  # warm-up: every length must be captured
        warm_up = decode_by(
            side.decoder, side.rule, num_tokens if side.decoder.captures else WARM_UP_TOKENS
        )
        for seed, prompt in enumerate(prompts if side.decoder.captures else prompts[:1]):
            warm_up(prompt.ids, seed)
    for seed, prompt in enumerate(prompts):
        for side, decoded in zip(sides, answers, strict=True):
            decoded.append(decode_by(side.decoder, side.rule, num_tokens)(prompt.ids, seed))
    rows = []
    for side, decoded in zip(sides, answers, strict=True):
        rate, overhead = acceleration_rate(decoded), _overhead(decoded, answers[0])
        figures = {"acceleration_rate": rate, "overhead": overhead, "speedup": rate / overhead}
        texts = [one.token_ids for one in decoded]
        figures["log_likelihood"] = mean_log_likelihood(side.decoder.model, prompts, texts)
        rows.append(
            {"rule": side.name, "eps": side.eps}
            | {key: rounded(value) for key, value in figures.items()}
        )
    return rows


def _overhead(decoded: Sequence[Decoded], plain: Sequence[Decoded]) -> float:
    both = [
        (one, other)
        for one, other in zip(decoded, plain, strict=True)
        if one.num_steps and other.num_steps
    ]
    ratios = [
        (one.seconds / one.num_steps) / (other.seconds / other.num_steps) for one, other in both
    ]
    return statistics.median(ratios) if ratios else nan
