"""All tables of a report, the same in every form, and those of the run itself.

A table without rows stands for something that was not run. An unknown cell is `-`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.artifacts.tree_file import Accuracy, Calibration, ChainLength, Expected, TreeFigures
from pipeline.formatting import (
    NOT_RUN,
    UNKNOWN,
    count,
    duration,
    pairs,
    percent,
    rate,
    ratio,
    show,
    signed_percent,
    times,
)
from pipeline.report.facts import expected_rate
from pipeline.report.report import STAGES, Report, StageFigures


@dataclass
class Table:
    """A table of text, filled row by row; `empty` is shown where it has no rows."""

    title: str
    columns: list[str]
    note: str = ""
    empty: str = NOT_RUN
    words: tuple[int, ...] = (0,)  # text columns; the others are numbers, aligned to the right
    rows: list[tuple[str, ...]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # per row, a bar's share of the largest

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def add_known(self, label: str, *cells: str) -> None:
        """Add a row unless all its cells are unknown."""
        if any(cell != UNKNOWN for cell in cells):
            self.rows.append((label, *cells))


def heads_table(report: Report) -> Table:
    """Top-k accuracy of every head on held-out rows; head k predicts the token at t+2+k."""
    tree = report.tree
    ranks = [
        rank for rank in range(1, 6) if any(top(head, rank) is not None for head in report.heads)
    ]
    table = Table("Heads", ["head", "predicts"], words=(0, 1))
    table.columns += [f"top-{rank}" for rank in ranks]
    table.note = f"Accuracy on {tree.text if tree else 'held-out rows'}."
    on_new = tree and tree.seen_share > 0
    if tree and on_new:
        table.columns += ["top-1, new answers", "top-5, new answers"]
        table.note += (
            f" {percent(tree.seen_share)} of the answers are in the training text as well; the new"
            " ones stand apart."
        )
    for k, head in enumerate(report.heads):
        cells = [percent(top(head, rank)) for rank in ranks]
        if on_new:
            new = head.new or Accuracy(labels=0)
            cells += [percent(new.top1), percent(new.top5)]
        table.add(str(k), f"t+{k + 2}", *cells)
    return table


def top(head: Accuracy, rank: int) -> float | None:
    """The share of tokens among the head's first guesses, up to the 1-based `rank`."""
    return (head.top1, head.top2, head.top3, head.top4, head.top5)[rank - 1]


def tree_table(report: Report, calibration: Calibration | None) -> Table:
    """The tree by depth, and the tokens that each depth adds to a step: their sum is the rate."""
    table = Table("Tree", ["depth", "nodes", "ranks used", "tokens per step"])
    tree = report.tree
    if not tree:
        return table
    own = "the target's own token"
    if tree.dynamic:
        static = ratio((tree.searches or {}).get(tree.source))
        table.note = (
            f"Native decoding grows a dynamic tree: in every step the {count(tree.nodes)} nodes"
            f" that the heads hold most probable, expected acceleration rate {expected_rate(tree)}."
            f" A static tree of the same size, by the {tree.source} search, reaches {static} on"
            " text not used for the search; it is in the export for engines that read paths."
        )
        table.add("0", own, UNKNOWN, ratio(1.0))
        for depth, tokens in enumerate(tree.tokens_by_depth, start=1):
            table.add(str(depth), UNKNOWN, UNKNOWN, ratio(tokens))
        return table
    table.note = f"{count(tree.nodes)} nodes, expected acceleration rate {expected_rate(tree)}."
    if tree.searches:
        reached = [f"the {name} search reaches {ratio(r)}" for name, r in tree.searches.items()]
        table.note += f" On text not used for the search, {', '.join(reached)}."
    if not calibration:
        table.add("all", count(tree.nodes), UNKNOWN, UNKNOWN)
        return table
    table.add("0", own, UNKNOWN, ratio(1.0))
    for depth in range(1, 1 + max(map(len, calibration.choices))):
        ranks = []
        tokens = 0.0
        for path, share in zip(calibration.choices, calibration.node_shares, strict=True):
            if len(path) == depth:
                ranks.append(path[-1])
                tokens += share
        table.add(str(depth), count(len(ranks)), str(1 + max(ranks)), ratio(tokens))
    return table


def sizes_table(tree: TreeFigures | None) -> Table:
    """The cost and the expected speedup of trees of several sizes on the device."""
    columns = ["nodes", "overhead", "expected rate", "expected speedup"]
    table = Table("Tree sizes", columns, empty="not measured", words=())
    if not tree:
        return table
    which = "Dynamic trees" if tree.dynamic else f"The {tree.source} search"
    table.note = f"{which}; {count(tree.nodes)} nodes are used, the fastest up to 5 %."
    for size in tree.sizes or []:
        table.add(count(size.nodes), *_expected_cells(size))
    return table


def _expected_cells(expected: Expected) -> tuple[str, str, str]:
    return times(expected.overhead), expected_rate(expected), times(expected.expected_speedup)


def chain_table(tree: TreeFigures | None) -> Table:
    """The chain that vLLM drafts, by its number of tokens."""
    table = Table("Chain", ["tokens", "expected rate"], words=())
    if not tree:
        return table
    is_timed = any(length.overhead for length in tree.chain)
    drafted = count(tree.num_speculative_tokens)
    table.note = f"What vLLM drafts: first guesses alone. {drafted} tokens are drafted"
    if is_timed:
        most_accepting = max(tree.chain, key=_expected_tokens)
        table.columns = ["tokens", "overhead", "expected rate", "expected speedup"]
        table.note += (
            ", the fastest up to 5 % by native overheads;"
            f" {count(most_accepting.draft_tokens)} would accept most"
        )
    table.note += "."
    for length in tree.chain:
        cells = _expected_cells(length) if is_timed else (expected_rate(length),)
        table.add(count(length.draft_tokens), *cells)
    return table


def _expected_tokens(length: ChainLength) -> float:
    return length.expected_acceleration_rate or 0


def drift_table(report: Report) -> Table:
    """Tabulate Medusa-2's drift from the original, on held-out text of the original."""
    table = Table("Drift", ["", "value"])
    train = report.train
    if not train or not train.drift:
        return table
    sides = "The tuned target against the original"
    if train.quantization:
        sides += f" in {train.quantization}, in which it was trained"
    if train.adapter_drift:
        sides = "The published weights against the original"
    table.note = f"{sides}, at the target-written positions of held-out rows."
    drift = train.drift
    perplexity = drift.perplexity or {}
    table.add("KL to the original, nats per position", show(drift.kl, ".4f"))
    table.add("perplexity, original", show(perplexity.get("original"), ".3f"))
    table.add("perplexity, tuned", show(perplexity.get("tuned"), ".3f"))
    table.add("perplexity, change", signed_percent(drift.perplexity_change))
    table.add("same greedy token", percent(drift.greedy_agreement))
    table.add("positions", count(drift.positions))
    return table


def stages_table(report: Report) -> Table:
    """Each stage with its rows, quarantined rows, time and output."""
    columns = ["stage", "rows", "quarantined", "time", "made"]
    table = Table("Stages", columns, words=(0, 4))
    seconds = report.seconds_by_stage
    figures: dict[str, StageFigures | None] = {
        "seeds": report.seeds,
        "generate": report.generate,
        "features": report.features,
        "train": report.train,
    }
    native = report.native
    for name in _stages_in_order(seconds):
        part = figures.get(name)
        if name not in seconds and not part:
            table.add(name, NOT_RUN, NOT_RUN, NOT_RUN, (report.skipped or {}).get(name, ""))
            continue
        num_rows = quarantined = None
        if part:
            num_rows, quarantined = part.rows, part.quarantined
        if name == "check" and native:
            num_rows = native.prompts
        if quarantined is None and report.quarantine and name in report.quarantine:
            quarantined = sum(report.quarantine[name].values())
        time = duration(seconds.get(name))
        table.add(name, count(num_rows), count(quarantined), time, _made(report, name, part))
    table.shares = _shares([seconds.get(name, 0) for name, *_ in table.rows])
    return table


def _stages_in_order(seconds: dict[str, float]) -> list[str]:
    """The usual stages in order; a further one stands where it was run."""
    names = list(STAGES)
    place = 0
    for name in seconds:
        if name not in names:
            names.insert(place, name)
        place = names.index(name) + 1
    return names


def _made(report: Report, stage: str, part: StageFigures | None) -> str:
    """The output of a stage in a few words."""
    if part is None:
        return ", ".join(_decided(report, stage))
    facts = []
    if part.tool_rows is not None:
        facts.append(f"{count(part.tool_rows)} rows call functions")
    if stage == "features":
        facts.append(f"{count(part.positions)} positions")
        facts.append(f"{rate(part.bytes_per_position)} bytes each")
    elif part.tokens is not None:
        facts.append(f"{count(part.tokens)} tokens")
    if part.tokens_per_second is not None:
        worker = "" if stage == "train" else " per busy worker"
        facts.append(f"{rate(part.tokens_per_second)} tokens/s{worker}")
    if part.special_token_rows is not None:
        facts.append(
            f"{count(part.special_token_rows)} rows with special tokens in the seed's text"
        )
    if part.cut_at_tools is not None:
        facts.append(
            f"{count(part.cut_at_tools)} rows cut before functions that the template cannot render"
        )
    if stage == "train" and report.train and report.train.final_loss is not None:
        facts.append(f"loss {ratio(report.train.final_loss)}")
    return ", ".join(facts)


def _decided(report: Report, stage: str) -> list[str]:
    """The facts of a stage that makes no rows."""
    native = report.native
    if stage == "calibrate" and report.tree:
        expected = expected_rate(report.tree)
        return [f"{count(report.tree.nodes)} nodes", f"expects {expected} tokens per step"]
    if stage == "check" and native and native.skipped_prompts is not None:
        return [f"{count(native.skipped_prompts)} prompts skipped"]
    return []


def quarantine_table(report: Report) -> Table:
    """Quarantined rows by stage and reason, most frequent first."""
    table = Table("Quarantine", ["stage", "reason", "rows"], words=(0, 1))
    if report.quarantine is None:
        return table
    table.empty = "nothing quarantined"
    entries = []
    for stage, reasons in report.quarantine.items():
        for reason, num_rows in reasons.items():
            if num_rows:
                entries.append((num_rows, stage, reason))
    entries.sort(key=lambda entry: (-entry[0], *entry[1:]))
    for num_rows, stage, reason in entries:
        table.add(stage, reason, count(num_rows))
    table.shares = _shares([num_rows for num_rows, *_ in entries])
    return table


def _shares(values: list[float]) -> list[float]:
    largest = max(values, default=0) or 1
    return [value / largest for value in values]


def skipped_files_table(report: Report) -> Table:
    """The files of the seeds' directories that were not read, and why."""
    table = Table("Skipped files", ["file", "why"], words=(0, 1))
    sources = report.seeds.sources if report.seeds else None
    num_read = 0
    for source in sources or []:
        num_read += len(source.read)
        for file in source.skipped:
            table.add(file.name, file.why)
    table.note = f"{count(num_read)} files of seeds were read."
    return table


def provenance_table(report: Report) -> Table:
    """The hardware, versions and inputs of the figures."""
    table = Table("Provenance", ["", ""], words=(0, 1))
    facts = {"target": report.target, "method": report.method, "heads": report.drafter}
    if report.run:
        facts["run"] = report.run.name
        facts["date"] = report.run.date
    facts["hardware"] = pairs(report.hardware)
    facts["versions"] = pairs(report.versions)
    if report.run:
        facts["fingerprints"] = pairs(report.run.fingerprints)
    for name, text in facts.items():
        if text:
            table.add(name, text)
    return table
