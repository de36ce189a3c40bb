"""Fair draws of conversations: every source and category in its share, whatever the order of rows.

Rows are read one source after another, so the first N of them may all be of one source.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

Stratum = TypeVar("Stratum", bound=Hashable)


def id_hash(id: str) -> int:
    """Hash an id to an integer of 64 bits."""
    return int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big")


def fair_order(
    strata: Mapping[str, Stratum], sizes: Mapping[Stratum, int] | None = None
) -> list[str]:
    """Order ids so that for every N the first N are a fair draw.

    Of a stratum the ids with the smallest hashes come first. The first N have each stratum in
    proportion to its size, by Sainte-Laguë's rule: id i, from 0, of a stratum of size n comes at
    (i + 1/2) / n. A stratum with fewer ids than its share gives all, and others take its place.
    The result does not depend on the order of `strata`.

    Args:
        strata: The stratum of each id.
        sizes: The size of each stratum; by default the number of its ids.
    """
    sizes = sizes or Counter(strata.values())
    place_of = {}
    num_before: Counter[Stratum] = Counter()
    in_order = sorted(strata, key=id_hash)
    for id in in_order:
        stratum = strata[id]
        place_of[id] = (num_before[stratum] + 0.5) / sizes[stratum]
        num_before[stratum] += 1
    return sorted(in_order, key=place_of.__getitem__)
