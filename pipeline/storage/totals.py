"""Sums over a stage's receipts: rows, rejected rows and their reasons, statistics, rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipeline.conversations.conversation import Reason
from pipeline.errors import DataError
from pipeline.storage.done import Summary
from pipeline.storage.receipts import Receipt

ENOUGH_TO_JUDGE = 100  # rows; a fraction of fewer says nothing yet


class StageTotals:
    """Sums over receipts, one addition per shard however many there are."""

    def __init__(self, receipts: Iterable[Receipt] = ()):
        self.shards = self.rows = self.quarantined = 0
        self.reasons: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()
        self._timed_tokens = self._busy_seconds = 0.0
        for receipt in receipts:
            self.add(receipt)

    def add(self, receipt: Receipt) -> None:
        self.shards += 1
        self.rows += receipt.num_rows
        self.quarantined += receipt.num_quarantined
        self.reasons.update(receipt.reasons)
        self.stats.update(receipt.stats)
        if receipt.note and receipt.note.busy_seconds:
            self._timed_tokens += receipt.stats.get("tokens", 0)
            self._busy_seconds += receipt.note.busy_seconds

    def summary(self) -> Summary:
        """The sums as DONE.json has them; the rate is per second that a worker was busy, so that a
        resume keeps it.
        """
        summary: Summary = {
            "rows": self.rows,
            "quarantined": self.quarantined,
            "reasons": dict(self.reasons),
            **dict(sorted(self.stats.items())),
        }
        if self._busy_seconds:
            summary["tokens_per_second"] = round(self._timed_tokens / self._busy_seconds, 1)
        return summary

    def check_quarantine(self, stage: str, where: str, max_fraction: float, *, final: bool) -> None:
        """Raise where more than the allowed fraction was rejected; before the end, only once enough
        rows were seen.

        Raises:
            DataError: Names the fraction and the top reasons.
        """
        repeated = (Reason.DUPLICATE, Reason.CONTAMINATED)
        reasons = Counter(
            {reason: n for reason, n in self.reasons.items() if reason not in repeated}
        )
        refused = reasons.total()
        seen = self.rows + refused
        if seen and refused / seen > max_fraction and (final or seen >= ENOUGH_TO_JUDGE):
            top = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))
            raise DataError(
                f"{stage} refused {refused} of {seen} rows, a fraction above"
                f" limits.max_quarantine_fraction = {max_fraction}; top reasons: {top}.",
                where,
                "Read the quarantine files there, correct the input or raise the limit; what was"
                " committed is kept.",
            )
