"""inference/verify.py, tree rule: every draft enumerated, every uniform number integrated, against p; wrong rules."""

from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
import torch
from torch import Tensor

import inference.verify as module
from conf.schema import Rule
from eval.rule_law import by_node, law_of_round
from inference.tree import Tree, chain
from inference.verify import Verdict, verify, verify_greedy, verify_tree, verify_tree_greedy

V = 4
SHAPES = {"two paths": [0, 0, 1, 2, 2], "wide": [0, 0, 0, 1], "chain": [0, 1], "ragged": [0, 0, 1, 2, 2]}
PADDED = {"ragged": 4}  # of which the last does not count
Judge = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tree, Tensor, Tensor], Verdict]


def laws(seed: int, flat: float = 1.0) -> list[Tensor]:
    """[V], [V,V], [V,V,V]: random distributions after no, one and two tokens."""
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn((V,) * n, generator=g, dtype=torch.float64) * flat).softmax(-1) for n in (1, 2, 3)]


class Round:
    """All drafts of a shape: their probability [R], tokens [R,N], p [R,1+N,V] and q [R,N,V]."""

    def __init__(
        self, shape: list[int], p: list[Tensor], q: list[Tensor], drafts: list[tuple[float, list[int]]]
    ) -> None:
        self.shape, self.p = shape, p
        self.chance = torch.tensor([chance for chance, _ in drafts], dtype=torch.float64)
        self.tokens = torch.tensor([tokens for _, tokens in drafts])
        paths = [[self.path(tokens, node) for node in range(len(shape) + 1)] for _, tokens in drafts]
        self.said = torch.stack([torch.stack([p[len(path)][tuple(path)] for path in row]) for row in paths])
        drawn = [[row[parent] for parent in shape] for row in paths]
        self.drawn = torch.stack([torch.stack([q[len(path)][tuple(path)] for path in row]) for row in drawn])

    def path(self, tokens: list[int], node: int) -> list[int]:
        return [] if node == 0 else [*self.path(tokens, self.shape[node - 1]), tokens[node - 1]]

    def error(self, judge: Judge, counts: int, one_hot: bool) -> float:
        """Largest error of the law of three tokens: what the round emitted, continued by the target."""
        tree = Tree(torch.tensor(self.shape), 2)

        def rule(rows: Tensor, accept: Tensor, final: Tensor) -> Verdict:
            shapes = Tree(tree.parents.expand(len(rows), -1), tree.depth)
            q = None if one_hot else self.drawn[rows]
            count = torch.full((len(rows),), counts)
            return judge(self.said[rows], q, self.tokens[rows], count, shapes, accept, final)

        found = law_of_round(by_node(rule), len(self.tokens), len(self.shape), V) * self.chance[:, None, None]
        law = torch.zeros(V, V, V, dtype=torch.float64)
        for row, node, token in found.nonzero().tolist():
            text = [*self.path(self.tokens[row].tolist(), node), token]
            rest = self.p[1][text[0]][:, None] * self.p[2][text[0]] if len(text) == 1 else self.p[2][tuple(text[:2])]
            law[tuple(text)] += found[row, node, token] * (rest if len(text) < 3 else 1.0)
        return float((law - self.p[0][:, None, None] * self.p[1][:, :, None] * self.p[2]).abs().max())


def without_replacement(law: Tensor, count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    for tokens in permutations(range(V), count):
        chance, left = 1.0, 1.0
        for token in tokens:
            chance, left = chance * float(law[token]) / left, left - float(law[token])
        yield chance, tokens


def all_drafts(shape: list[int], q: list[Tensor]) -> list[tuple[float, list[int]]]:
    """Every way to draw a shape's tokens, siblings without replacement."""
    drafts: list[tuple[float, list[int]]] = [(1.0, [])]
    at = 0
    while at < len(shape):  # siblings stand together
        count = shape.count(shape[at])
        grown = []
        for chance, tokens in drafts:
            path, node = [], shape[at]
            while node:
                path, node = [tokens[node - 1], *path], shape[node - 1]
            more = without_replacement(q[len(path)][tuple(path)], count)
            grown += [(chance * c, [*tokens, *drawn]) for c, drawn in more]
        drafts, at = grown, at + count
    return drafts


def best_drafts(shape: list[int], q: list[Tensor]) -> list[tuple[float, list[int]]]:
    """The one draft of the most probable tokens."""
    return [(1.0, max(all_drafts(shape, q))[1])]


P, Q = laws(0), laws(3, 0.7)  # P is above Q at two tokens of the first place: what is left of it has a shape


def round_of(name: str, one_hot: bool, q: list[Tensor] = Q) -> Round:
    shape = SHAPES[name]
    drafts = best_drafts(shape, q) if one_hot else all_drafts(shape, q)
    return Round(shape, P, q, drafts)


@pytest.mark.parametrize("one_hot", [False, True], ids=["drawn", "deterministic"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_emitted_is_distributed_as_the_target(name: str, one_hot: bool) -> None:
    counts = PADDED.get(name, len(SHAPES[name]))
    assert round_of(name, one_hot).error(verify_tree, counts, one_hot) < 1e-9


def test_siblings_that_could_not_be_drawn_do_not_count() -> None:
    narrow = [torch.where(law >= law.sort(-1).values[..., 2:3], law, 0.0) for law in Q]  # two tokens each
    narrow = [law / law.sum(-1, keepdim=True) for law in narrow]
    drafts = [(c, [*t, int(narrow[0].argmax()), 0]) for c, t in without_replacement(narrow[0], 2) if c > 0]
    assert Round(SHAPES["wide"], P, narrow, drafts).error(verify_tree, 3, False) < 1e-9


def drawn_rule_on_deterministic(p: Tensor, q: Tensor | None, *rest: object) -> Verdict:
    drawn = Round(SHAPES["wide"], P, Q, best_drafts(SHAPES["wide"], Q)).drawn
    return verify_tree(p, drawn.expand(len(p), -1, -1), *rest)  # type: ignore[arg-type]


def deterministic_rule_on_drawn(p: Tensor, q: Tensor | None, *rest: object) -> Verdict:
    return verify_tree(p, None, *rest)  # type: ignore[arg-type]


def same_q_for_later_siblings(p: Tensor, q: Tensor | None, draft: Tensor, *rest: object) -> Verdict:
    """As if siblings were drawn with replacement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_drawn_walk", _forgetful_walk)
        return verify_tree(p, q, draft, *rest)  # type: ignore[arg-type]


def _forgetful_walk(
    p: Tensor, q: Tensor, draft: Tensor, valid: Tensor, tree: Tree, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(p))
    at, left = torch.zeros(len(p), dtype=torch.int64), p[:, 0].clone()
    for k in range(draft.shape[1]):
        here, x = valid[:, k] & (tree.parents[:, k] == at), draft[:, k]
        kept = here & (uniforms[:, k] * q[rows, k, x] < left[rows, x])
        residual = (left - q[:, k]).clamp(min=0)
        residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-300)
        left = torch.where(kept[:, None], p[:, k + 1], torch.where(here[:, None], residual, left))
        at = torch.where(kept, k + 1, at)
    return at, left


def final_from_p(p: Tensor, q: Tensor | None, *rest: object) -> Verdict:
    true = verify_tree(p, q, *rest)  # type: ignore[arg-type]
    assert true.node is not None
    left = p[torch.arange(len(p)), true.node]
    return Verdict(true.accepted, module.draw(left, rest[-1]), true.node)  # type: ignore[arg-type]


def others_children(p: Tensor, q: Tensor | None, draft: Tensor, counts: Tensor, tree: Tree, *rest: object) -> Verdict:
    """The second path is taken for a child of the first."""
    return verify_tree(p, q, draft, counts, Tree(tree.parents.clamp(max=1), 2), *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong, name, one_hot", [
    (drawn_rule_on_deterministic, "wide", True), (same_q_for_later_siblings, "wide", False),
    (final_from_p, "wide", False), (final_from_p, "wide", True), (others_children, "two paths", True),
])  # fmt: skip
def test_wrong_rules_are_caught(wrong: Judge, name: str, one_hot: bool) -> None:
    assert round_of(name, one_hot).error(wrong, len(SHAPES[name]), one_hot) > 1e-4


def test_the_deterministic_rule_is_true_of_drawn_siblings_but_keeps_fewer() -> None:
    case = round_of("wide", False)
    assert case.error(deterministic_rule_on_drawn, 4, False) < 1e-9


def test_a_chain_is_verified_by_the_token_rule() -> None:
    g = torch.Generator().manual_seed(3)
    p, q = (torch.randn(500, n, 5, generator=g).double().softmax(-1) for n in (4, 3))
    draft, counts = torch.randint(5, (500, 3), generator=g), torch.randint(4, (500,), generator=g)
    accept, final = torch.rand(500, 3, generator=g).double(), torch.rand(500, generator=g).double()
    tree = chain(500, 3, p.device)
    for drawn in (q, None):
        wanted = verify(p, drawn, draft, counts, accept, final, Rule.token)
        found = verify_tree(p, drawn, draft, counts, tree, accept, final)
        assert torch.equal(found.accepted, wanted.accepted) and torch.equal(found.next, wanted.next)
    greedy = verify_tree_greedy(p.argmax(-1), draft, counts, tree)
    wanted = verify_greedy(p.argmax(-1), draft, counts)
    assert torch.equal(greedy.accepted, wanted.accepted) and torch.equal(greedy.next, wanted.next)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_follows_the_path_that_agrees(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.randint(i + 1, (200, 1), generator=g) for i in range(6)], 1)
    tree, best = Tree(rows, 6), torch.randint(3, (200, 7), generator=g)
    draft, counts = torch.randint(3, (200, 6), generator=g), torch.randint(7, (200,), generator=g)
    for b in range(200):  # siblings differ
        tried: set[tuple[int, int]] = set()
        for i, parent in enumerate(rows[b].tolist()):
            while (parent, int(draft[b, i])) in tried:
                draft[b, i] += 1
            tried.add((parent, int(draft[b, i])))
    verdict = verify_tree_greedy(best, draft, counts, tree)
    assert verdict.node is not None
    for b in range(200):
        node, depth, found = 0, 0, True
        while found:
            children = [i + 1 for i in range(int(counts[b])) if rows[b, i] == node and draft[b, i] == best[b, node]]
            found = bool(children)
            node, depth = (children[0], depth + 1) if found else (node, depth)
        assert (verdict.node[b], verdict.accepted[b], verdict.next[b]) == (node, depth, best[b, node])


def test_one_hot_rows_are_greedy_under_either_rule() -> None:
    g = torch.Generator().manual_seed(7)
    tree = Tree(torch.tensor([SHAPES["two paths"]] * 300), 2)
    best = torch.randint(V, (300, 6), generator=g)
    p = torch.nn.functional.one_hot(best, V).double()
    first = torch.stack([torch.randperm(V, generator=g) for _ in range(300)])
    draft = torch.cat([first[:, :2], torch.randint(V, (300, 1), generator=g), first[:, 1:3]], 1)
    q = torch.randn(300, 6, V, generator=g).double().softmax(-1)[torch.arange(300)[:, None], tree.parents]
    numbers, counts = torch.rand(300, 6, generator=g).double(), torch.full((300,), 5)
    wanted = verify_tree_greedy(best, draft, counts, tree)
    for drawn in (q, None):
        found = verify_tree(p, drawn, draft, counts, tree, numbers[:, :5], numbers[:, 5])
        assert found.node is not None and wanted.node is not None
        assert torch.equal(found.node, wanted.node) and torch.equal(found.next, wanted.next)


def test_the_chances_of_drawn_siblings_add_up() -> None:
    chances = list(without_replacement(Q[0], 2))
    assert sum(c for c, _ in chances) == pytest.approx(1) and len(chances) == V * (V - 1)
