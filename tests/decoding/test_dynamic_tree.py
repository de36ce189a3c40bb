"""Trees that grow in every step: against growing them one node after another, and against plain
decoding.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.acceptance import RejectionSampling, TypicalAcceptance, greedy_acceptance
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.dynamic_tree import NEVER, PREFER_PARENT, DynamicTree, GrownTree, check_tree
from pipeline.decoding.held_out import HeldOutPlaces
from pipeline.decoding.masks import GrownMasks, TreeMasks
from pipeline.decoding.tree import Tree
from pipeline.errors import ConfigError
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.decoding.conftest import PROMPT
from tests.decoding.steps import gumbel, random_step, random_trees
from tests.heads.test_recurrent import SIZE, VOCAB, random_cell

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda sizes: st.builds(
        DynamicTree,
        st.integers(1, sizes[1] + (sizes[0] - 1) * sizes[1] ** 2),
        st.just(sizes[0]),
        st.just(sizes[1]),
    )
)


@torch.no_grad()
def grown_by_hand(
    tree: DynamicTree, heads, hidden_D: torch.Tensor, token: int
) -> dict[tuple[int, ...], float]:
    """The chosen nodes as the tokens on their paths, each with its score; no guess is held less
    probable than e^-100.

    Examples with two nodes as probable as each other, by what fp32 can tell, are passed over.
    """
    proposed: dict[tuple[int, ...], float] = {}
    level = [((), 0.0, hidden_D, token)]
    for depth in range(tree.max_depth):
        children = []
        for path, score, hidden, last in level:
            state, logits = heads.expand(hidden[None, None], torch.tensor([[last]]), depth)
            log_p = logits[0, 0].log_softmax(0)
            for guess in log_p.argsort(descending=True)[: tree.top].tolist():
                children.append(
                    (
                        (*path, guess),
                        score + max(float(log_p[guess]), -100.0) - PREFER_PARENT,
                        state[0, 0],
                        guess,
                    )
                )
        proposed |= {path: score for path, score, *_ in children}
        level = heapq.nlargest(tree.top, children, key=lambda child: child[1])
    assume(min(np.diff(sorted(proposed.values())), default=1.0) > 1e-5)
    return dict(heapq.nlargest(tree.num_nodes, proposed.items(), key=lambda node: node[1]))


@given(SHAPES, st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_the_most_probable_nodes_are_chosen_and_form_a_tree(tree: DynamicTree, seed: int):
    heads, hidden, tokens = (
        random_cell(seed),
        torch.randn(2, SIZE, dtype=torch.float64),
        torch.tensor([4, 9]),
    )
    grown, tokens_BN = tree.grow(heads, hidden, tokens)
    for text, token in enumerate(tokens.tolist()):
        expected = grown_by_hand(tree, heads, hidden[text], token)
        paths = []
        for row in range(tree.num_nodes + 1):
            depth = int(grown.depth[text, row])
            rows = grown.retrieve_indices[text, row, : depth + 1].tolist()
            assert (
                rows[0] == 0
                and rows[-1] == row
                and not grown.retrieve_indices[text, row, depth + 1 :].any()
            )
            assert all(
                int(grown.parent[text, below]) == above for above, below in itertools.pairwise(rows)
            )
            seen = [
                other for other in range(tree.num_nodes + 1) if grown.ancestors[text, row, other]
            ]
            assert seen == sorted(rows)
            elsewhere = [
                other
                for other in range(tree.num_nodes + 1)
                if not grown.elsewhere[text, row, other]
            ]
            assert elsewhere == sorted(rows[1:])
            paths.append(tuple(tokens_BN[text, rows[1:]].tolist()))
        assert (
            tokens_BN[text, 0] == token
            and set(paths[1:]) == expected.keys()
            and len(set(paths)) == len(paths)
        )


@pytest.mark.parametrize(
    "rule",
    [
        greedy_acceptance,
        TypicalAcceptance(0.8),
        TypicalAcceptance(0.8, samples=True),
        RejectionSampling(0.8),
    ],
)
@given(st.lists(random_trees(), min_size=2, max_size=2), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_rules_accept_of_one_tree_per_text_what_they_accept_of_one_tree(rule, choices, seed):
    """Two texts with trees of their own; the smaller one is filled up with nodes whose token is
    impossible.
    """
    steps = [random_step(seed + text, each) for text, each in enumerate(choices)]
    steps = [(tree, with_impossible_token(logits), tokens) for tree, logits, tokens in steps]
    num_rows, deepest = (
        max(len(tokens) for *_, tokens in steps),
        max(tree.max_depth for tree, *_ in steps),
    )
    filled = [filled_up(*step, num_rows) for step in steps]
    parent, depth, ancestors, logits, tokens = (
        torch.stack(column) for column in zip(*filled, strict=True)
    )
    elsewhere = ~ancestors | (depth == 0)[:, None]
    grown = GrownTree(parent, depth, ancestors, elsewhere, parent[..., None], deepest)
    noise = gumbel((2, deepest + 1, logits.shape[-1]), seed)
    together = rule.accept(logits, tokens, grown, noise)
    for text, (tree, logits_NV, tokens_N) in enumerate(steps):
        alone = rule.accept(logits_NV, tokens_N, tree, noise[text])
        assert (int(together.row[text]), int(together.next_token[text])) == (
            int(alone.row),
            int(alone.next_token),
        )


def with_impossible_token(logits: torch.Tensor) -> torch.Tensor:
    return torch.cat((logits, torch.full_like(logits[:, :1], -1e9)), 1)


def filled_up(
    tree: Tree, logits: torch.Tensor, tokens: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, ...]:
    """A step with more children of the root, which no rule accepts."""
    more, num_tokens = num_rows - len(tokens), logits.shape[1]
    ancestors = torch.eye(num_rows, dtype=torch.bool)
    ancestors[: len(tokens), : len(tokens)] = tree.ancestors
    ancestors[:, 0] = True
    return (
        torch.cat((tree.parent, tree.parent.new_zeros(more))),
        torch.cat((tree.depth, tree.depth.new_ones(more))),
        ancestors,
        torch.cat((logits, logits.new_zeros(more, num_tokens))),
        torch.cat((tokens, tokens.new_full((more,), num_tokens - 1))),
    )


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@given(random_trees(), st.lists(st.integers(1, 9), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_masks_of_grown_trees_are_those_of_the_same_trees_known_before(window, choices, lengths):
    tree, where = Tree(choices), (torch.float64, torch.device("cpu"))
    columns = tree.parent, tree.depth, tree.ancestors, tree.elsewhere, tree.retrieve_indices
    grown = GrownTree(
        *(column.expand(len(lengths), *column.shape) for column in columns), tree.max_depth
    )
    expected = TreeMasks(tree, {"any": window}, 12, *where).after(lengths)
    assert torch.equal(GrownMasks({"any": window}, torch.float64).after(lengths, grown), expected)


TREES = [DynamicTree(1, 1, 1), DynamicTree(7, 3, 3), DynamicTree(30, 3, 4)]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2-both-windows"])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_greedy_text_is_the_target_s_own(family, tree, pair, continuation):
    model, heads = pair(family)
    decoded = Decoder(model, heads, tree, eos_token_ids=()).generate(PROMPT, 40)
    assert decoded.token_ids == continuation(model, PROMPT, 40)
    assert max(decoded.accepted) > min(tree.max_depth, 2), "the heads know the answer"


def test_texts_of_a_batch_have_trees_of_their_own(pair):
    model, heads = pair("llama")
    prompts = [PROMPT, PROMPT[:3], [7, 7, 7, 7, 7]]
    plain = plain_decoder(model, eos_token_ids=())
    decoder = Decoder(model, heads, TREES[1], eos_token_ids=())
    together = decoder.generate_batch(prompts, 30)
    for prompt, decoded in zip(prompts, together, strict=True):
        alone = decoder.generate(prompt, 30)
        assert (decoded.token_ids, decoded.accepted) == (alone.token_ids, alone.accepted)
        assert decoded.token_ids == plain.generate(prompt, 30).token_ids


def test_sampled_text_is_what_plain_sampling_draws(pair):
    model, heads = pair("llama")
    rule, plain = RejectionSampling(0.9), plain_decoder(model, eos_token_ids=())
    decoder = Decoder(model, heads, TREES[2], eos_token_ids=())
    for seed in range(5):
        draws = [torch.Generator().manual_seed(seed) for _ in range(2)]
        assert (
            decoder.generate(PROMPT, 30, rule, draws[0]).token_ids
            == plain.generate(PROMPT, 30, rule, draws[1]).token_ids
        )


@given(SHAPES, st.integers(0, 99), st.data())
@settings(max_examples=50, deadline=None)
def test_a_true_token_s_place_is_that_of_its_node_among_all_that_are_proposed(
    tree: DynamicTree, seed, data
):
    heads, hidden, tokens = (
        random_cell(seed),
        torch.randn(3, SIZE, dtype=torch.float64),
        torch.tensor([4, 9, 4]),
    )
    widest = tree.resized(10**9)
    labels, expected = (
        torch.full((widest.max_depth + 1, 3), IGNORED),
        torch.full((widest.max_depth, 3), NEVER),
    )
    for text, token in enumerate(tokens.tolist()):
        scores = grown_by_hand(widest, heads, hidden[text], token)
        ordered = sorted(scores, key=scores.__getitem__, reverse=True)
        assert len(ordered) == widest.num_proposed
        path = data.draw(st.sampled_from(ordered))
        for depth in range(len(path)):
            labels[depth, text], expected[depth, text] = (
                path[depth],
                ordered.index(path[: depth + 1]),
            )
    for chunk_bytes in (1, 1 << 30):
        found = tree.places(heads, hidden, tokens, labels, chunk_bytes=chunk_bytes)
        assert found.dtype == torch.int16 and found.tolist() == expected.tolist()


def test_below_a_token_that_is_not_proposed_nothing_has_a_place():
    """Not even the root's own child, one depth below where it is proposed."""
    heads, tree = random_cell(), DynamicTree(1, 2, 2)
    hidden, roots = torch.randn(3, SIZE, dtype=torch.float64), torch.tensor([4, 9, 4])
    children_BC = tree.propose(heads, hidden, roots)[0][:, : tree.top]
    missing = [min(set(range(VOCAB)) - set(children)) for children in children_BC.tolist()]
    labels = torch.stack((torch.tensor(missing), children_BC[:, 0]))
    assert tree.places(heads, hidden, roots, labels).eq(NEVER).all()


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
def test_of_certain_guesses_the_nodes_near_the_root_are_chosen(num_nodes):
    """Each guess has probability one in fp32, so that a child is as probable as its parent."""
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, 6))
    heads.lm_head.data[:, 7] = 200.0
    tree, _ = DynamicTree(num_nodes, 6, 3).grow(heads, torch.ones(2, SIZE), torch.tensor([4, 9]))
    assert tree.depth.tolist() == [list(range(num_nodes + 1))] * 2
    assert tree.parent.tolist() == [[0, *range(num_nodes)]] * 2


@pytest.mark.slow
def test_the_walk_by_places_takes_the_very_steps_of_the_decoder_whatever_the_tree_s_size(
    target_of, continuation, fitted_heads
):
    model, prompts = target_of("llama"), ([3, 1, 4, 1, 5], [11, 2], [6, 6, 9, 4])
    texts = [continuation(model, prompt, 40) for prompt in prompts]
    heads = fitted_heads(model, [*prompts[0], *texts[0]], 3, known=0.7)
    heads.lm_head.data *= 8  # as sure as trained heads are, so that trees differ from step to step
    parts = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            hidden_TD = model.base_model(torch.tensor([prompt + text])).last_hidden_state[0]
        labels = [
            [text[t + 1 + k] if t + 1 + k < 40 else IGNORED for t in range(39)] for k in range(3)
        ]
        roots = hidden_TD[len(prompt) - 1 :][:39], torch.tensor(text[:39])
        parts.append(DynamicTree(1, 3, 4).places(heads, *roots, torch.tensor(labels)).numpy())
    places = HeldOutPlaces(
        np.concatenate(parts, axis=1), np.array([0, 39, 78]), np.arange(3), np.zeros(3, bool)
    )
    rates = []
    for num_nodes in (1, 3, 9, 36):
        decoder = Decoder(model, heads, DynamicTree(num_nodes, 3, 4), eos_token_ids=())
        decoded = [decoder.generate(prompt, 40) for prompt in prompts]
        assert [one.token_ids for one in decoded] == texts
        walked = places.walk(num_nodes)
        assert (walked.kept_S + 1).tolist() == [kept for one in decoded for kept in one.accepted]
        rates.append(walked.acceleration_rate)
    assert rates == sorted(rates) and rates[-1] > rates[0] > 1.1, (
        "the case must see guesses accepted"
    )


def test_a_tree_that_the_heads_cannot_fill_is_refused():
    assert check_tree(TREES[1], 3, 3) == TREES[1]
    for depth, top in ((2, 3), (3, 2)):
        with pytest.raises(ConfigError, match="dynamic tree of depth 3 with 3 guesses"):
            check_tree(TREES[1], depth, top)


@pytest.mark.parametrize("sizes", [(4, 1, 3), (13, 2, 3), (0, 2, 3)])
def test_more_nodes_than_are_proposed_are_refused(sizes):
    with pytest.raises(ValueError, match="nodes of the"):
        DynamicTree(*sizes)
