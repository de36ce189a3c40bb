"""Fair draws: every beginning of the order has each stratum in its share."""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.fair_draw import fair_order

strata = st.dictionaries(st.text(max_size=4), st.sampled_from("abcde"), max_size=60)


def sha256(id: str) -> str:
    return hashlib.sha256(id.encode()).hexdigest()


@given(strata=strata, random=st.randoms())
def test_nothing_is_lost_and_the_order_of_ids_means_nothing(strata, random):
    order = fair_order(strata)
    assert sorted(order) == sorted(strata)
    for stratum in set(strata.values()):
        members = [id for id in order if strata[id] == stratum]
        assert members == sorted(members, key=sha256)
    shuffled = list(strata.items())
    random.shuffle(shuffled)
    assert fair_order(dict(shuffled)) == order


@given(strata=strata, more=st.dictionaries(st.sampled_from("abcde"), st.integers(0, 99)))
def test_no_other_choice_brings_two_strata_nearer_to_their_shares(strata, more):
    """Sainte-Laguë's condition on the first N, for every N, where strata have ids left."""
    available = Counter(strata.values())
    sizes = {name: number + more.get(name, 0) for name, number in available.items()}
    order = fair_order(strata, sizes)
    for number in range(len(order) + 1):
        taken = Counter(strata[id] for id in order[:number])
        with_ids_left = [name for name in available if taken[name] < available[name]]
        for given_to in taken:
            last = (taken[given_to] - 0.5) / sizes[given_to]
            assert all((taken[name] + 0.5) / sizes[name] >= last for name in with_ids_left)
