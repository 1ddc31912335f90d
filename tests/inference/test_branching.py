"""inference/drafters/branching.py: shapes, what is drafted in them, greedy texts, statistics, parity, limits."""

from typing import Any

import pytest
import torch
from drafting import make_config, make_drafter, make_target
from torch import Tensor

from conf.errors import ConfigError
from inference.acceptance import Counts
from inference.decode import Decoder, Request, Result
from inference.drafters import Draft, Drafter, build
from inference.drafters.branching import Followed, Vocabulary, grow, levels_of, siblings
from inference.parity import check_parity
from inference.sampling import Sampling, SamplingRows
from inference.target import Target
from inference.tree import Dynamic, Static, depths_of
from tiny import VOCAB

CPU = torch.device("cpu")
IDS = torch.tensor([i for i in range(VOCAB) if i % 3])  # a trimmed vocabulary
PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [40, 3, 40, 3, 40], [7], list(range(20, 34)), [9, 9, 9]]
LIMITS = [11, 1, 8, 5, 7]
SHAPE = [0, 0, 0, 1, 1, 2, 4, 6]
TREES: dict[str, dict[str, Any]] = {
    "static": {"tree": "static", "tree_parents": SHAPE},
    "dynamic": {"tree": "dynamic", "tree_nodes": 7, "tree_top_k": 3},
}
TRIMMED: dict[str, Any] = {"draft_vocab_size": len(IDS)}
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "medusa trimmed lookup": {"lookup": True, **TRIMMED},
    "hydra trimmed": TRIMMED,
    "hydra unshared": {"share_steps": False, "num_layers": 2},
    "hydra gru": {"chain": "gru", "num_layers": 2},
    "hydra prefix trimmed lstm": {"chain": "lstm", "taps": [1], "own_head": True, "prefix_attention": True, **TRIMMED},
    "eagle3": {},
    "eagle3 variant": dict.fromkeys(("norm_output", "norm_before_residual", "norm_before_fc", "own_embedding"), True),
    "eagle3 trimmed lookup": {"lookup": True, **TRIMMED},
    "lm": {},
    "lm trimmed": TRIMMED,
    "lm lookup": {"lookup": True},
}


def drafter_of(name: str, tree: str, target: Target) -> Drafter:
    kind, layers = name.split()[0], {"layers": list(range(target.num_layers))}
    ids = IDS if "trimmed" in name else None
    return make_drafter(kind, target, ids=ids, **(layers if kind == "lm" else {}) | KINDS[name] | TREES[tree])


def requests(limits: list[int] = LIMITS) -> list[Request]:
    return [Request(p, f"r{i}", n) for i, (p, n) in enumerate(zip(PROMPTS, limits, strict=True))]


def plain(target: Target, asked: list[Request], sampling: Sampling | None = None) -> list[list[int]]:
    return [result.tokens for result in Decoder(target, sampling=sampling).generate(asked)]


def check(result: Result, tokens: list[int]) -> None:
    assert result.tokens == tokens and [t for r in result.rounds for t in r.emitted] == tokens[1:]
    for r in result.rounds:
        assert r.emitted[: r.kept] == r.drafted[: r.kept] and len(r.emitted) <= r.accepted + 1


class Table:
    """Branches whose logits depend on the path alone: a drafter that can be followed by hand."""

    def __init__(self, batch: int, width: int) -> None:
        self.width, self.paths = width, [[[b]] for b in range(batch)]
        self.logits = self._say()

    def _say(self) -> Tensor:
        return torch.stack([torch.stack([self.after(path) for path in row]) for row in self.paths])

    def after(self, path: list[int]) -> Tensor:
        g = torch.Generator().manual_seed(hash(tuple(path)) % 2**31)
        return 2 * torch.randn(self.width, generator=g, dtype=torch.float64)

    def follow(self, parents: Tensor, tokens: Tensor) -> Tensor:
        self.paths = [
            [[*row[p], t] for p, t in zip(above, new, strict=True)]
            for row, above, new in zip(self.paths, parents.tolist(), tokens.tolist(), strict=True)
        ]
        return self._say()


def path_to(draft: Draft, row: int, node: int) -> list[int]:
    assert draft.tree is not None
    if node == 0:
        return [row]
    return [*path_to(draft, row, int(draft.tree.parents[row, node - 1])), int(draft.tokens[row, node - 1])]


def grown(shape: Static | Dynamic, k: int, ids: Tensor | None = None, sampling: Sampling | None = None) -> Draft:
    rows = SamplingRows([sampling or Sampling()] * 3, CPU)
    return grow(shape, Table(3, 6), k, Vocabulary(ids, 20, "table"), rows, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("ids", [None, torch.tensor([3, 4, 7, 11, 12, 19])], ids=["full", "trimmed"])
def test_a_static_tree_has_the_most_probable_tokens_after_each_node(ids: Tensor | None) -> None:
    draft, table = grown(Static(tuple(SHAPE)), 4, ids), Table(3, 6)
    assert draft.tree is not None and draft.tree.parents.tolist() == [SHAPE] * 3 and draft.probs is None
    assert draft.logits is not None and draft.counts.tolist() == [8] * 3
    for b in range(3):
        for node, parent in enumerate(SHAPE, 1):
            said = table.after(path_to(draft, b, parent))
            best = said.argsort(descending=True)[SHAPE[: node - 1].count(parent)]
            assert draft.tokens[b, node - 1] == (best if ids is None else ids[best])
            assert torch.equal(draft.logits[b, node - 1], said)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_shallower_draft_is_the_upper_part(k: int) -> None:
    whole, part = grown(Static(tuple(SHAPE)), 4), grown(Static(tuple(SHAPE)), k)
    count = sum(depth <= k for depth in depths_of(SHAPE)[1:])
    assert part.tree is not None and part.tree.depth == k
    assert torch.equal(part.tokens, whole.tokens[:, :count]) and part.tree.parents[0].tolist() == SHAPE[:count]


def test_sampled_siblings_differ_and_their_q_is_told() -> None:
    draft, table = grown(Static(tuple(SHAPE)), 4, sampling=Sampling(1.3)), Table(3, 6)
    assert draft.probs is not None
    for b in range(3):
        for node, parent in enumerate(SHAPE, 1):
            q = (table.after(path_to(draft, b, parent)) / 1.3).softmax(-1)
            torch.testing.assert_close(draft.probs[b, node - 1, :6], q)
        children = [(parent, int(draft.tokens[b, i])) for i, parent in enumerate(SHAPE)]
        assert len(set(children)) == len(SHAPE)


def test_greedy_rows_beside_sampled_ones_get_the_best_and_truncation_runs_out() -> None:
    logits = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = SamplingRows([Sampling(), Sampling(1.0, top_k=2), Sampling(1.0)], CPU)
    columns, q = siblings(logits, 4, rows, torch.Generator().manual_seed(1))
    assert q is not None and torch.equal(columns[0], logits[0].argsort(-1, descending=True)[:, :4])
    torch.testing.assert_close(q[0], logits[0].softmax(-1))
    assert int((q[1] > 0).sum()) == 4 and len(set(columns[1, 0, :2].tolist())) == 2
    assert all(len(set(row)) == 4 for row in columns[2].tolist())


@pytest.mark.parametrize("nodes, top_k, depth", [(6, 2, 3), (40, 2, 3), (5, 6, 2), (3, 1, 3), (9, 3, 1)])
def test_a_dynamic_tree_has_the_most_confident_paths(nodes: int, top_k: int, depth: int) -> None:
    draft, table = grown(Dynamic(nodes, top_k, depth), 9), Table(3, 6)
    assert draft.tree is not None and draft.confidence is not None and draft.probs is None
    for b in range(3):
        every: dict[tuple[int, ...], float] = {}
        followed = {(b,): 1.0}
        for _ in range(depth):
            level: dict[tuple[int, ...], float] = {}
            for path, chance in followed.items():
                top = table.after(list(path)).softmax(-1).topk(top_k)
                for p, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                    level[(*path, token)] = chance * p
            every |= level
            followed = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
        wanted = dict(sorted(every.items(), key=lambda item: -item[1])[:nodes])
        found = {tuple(path_to(draft, b, node)): node for node in range(1, draft.tokens.shape[1] + 1)}
        assert found.keys() == wanted.keys()
        for path, node in found.items():
            assert float(draft.confidence[b, node - 1]) == pytest.approx(wanted[path])


def test_levels_say_what_is_followed() -> None:
    levels = levels_of(tuple(SHAPE), 4)
    assert [level.parents for level in levels] == [[0, 0, 0], [0, 0, 1], [0, 1]]
    assert [level.ranks for level in levels] == [[0, 1, 2], [0, 1, 0], [0, 0]]
    assert [level.followed for level in levels] == [[0, 1], [0, 2], []]


# In the loop


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_text_is_the_plain_one(arch: str, tree: str) -> None:
    target, asked, counts = make_target(arch), requests(), Counts()
    for sampling in (Sampling(), Sampling(repetition_penalty=1.3)):
        expected = plain(target, asked, sampling)
        for name in KINDS:
            drafter = drafter_of(name, tree, target)
            for batch in (1, 4):
                loop = Decoder(target, drafter, sampling=sampling, batch=batch, num_spec_tokens=3)
                for result, tokens in zip(loop.generate(asked), expected, strict=True):
                    check(result, tokens)
                    counts.add(result.rounds)
    assert counts.num_draft_tokens > 1.5 * sum(counts.proposed_at) and 1 < counts.mean_acceptance_length < 4


@pytest.mark.parametrize("tree", TREES)
def test_greedy_rows_beside_sampled_ones_stay_greedy(tree: str) -> None:
    target, asked = make_target(), requests()
    expected = plain(target, asked)
    for i in (2, 3):
        asked[i].sampling = Sampling(1.0, top_p=0.9)
    for name in ("hydra trimmed", "eagle3 trimmed lookup"):
        loop = Decoder(target, drafter_of(name, tree, target), batch=3)
        for result, tokens in zip(loop.generate(asked), expected, strict=True):
            check(result, tokens if result.request.sampling is None else result.tokens)
            assert len(result.tokens) == result.request.max_new_tokens


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_keeps_at_least_what_its_chain_would(tree: str) -> None:
    target = make_target()
    lengths = {}
    for shape in (tree, None):
        drafter = drafter_of("hydra unshared", tree, target)
        drafter.tree_shape = drafter.tree_shape if shape else None
        counts = Counts()
        for result in Decoder(target, drafter, num_spec_tokens=3).run(requests([40] * 5)):
            counts.add(result.rounds)
        lengths[shape] = counts.mean_acceptance_length
    assert lengths[tree] > lengths[None]


def test_the_length_limit_and_the_end_cut_a_path() -> None:
    assert sum(cut_inside(limit) for limit in (1, 2, 3)) > 0


def cut_inside(limit: int) -> int:
    """Paths that a limit or an end fell into; everything is plain decoding's."""
    free = plain(make_target("qwen2"), [Request(PROMPTS[0], max_new_tokens=12)])[0]
    target = make_target("qwen2", eos=free[limit])
    asked = [Request(PROMPTS[3], max_new_tokens=limit), Request(PROMPTS[0], max_new_tokens=12)]
    cut = 0
    for tree in TREES:
        changes = TREES[tree] | {"tree_nodes": 30, "num_spec_tokens": 4}
        drafter = make_drafter("lm", target, noise=0, **changes)  # its best path is right
        results = Decoder(target, drafter, batch=2, num_spec_tokens=4).generate(asked)
        for result, tokens in zip(results, plain(target, asked), strict=True):
            check(result, tokens)
            assert result.finish_reason == ("stop" if tokens[-1] in target.eos_ids else "length")
            cut += sum(len(r.emitted) <= r.accepted for r in result.rounds)
        assert results[1].tokens == free[: free.index(free[limit]) + 1]
    return cut


@pytest.mark.parametrize("tree", TREES)
def test_statistics_go_by_depth(tree: str) -> None:
    target = make_target()
    drafter = make_drafter("lm", target, noise=0, **TREES[tree])
    result = next(Decoder(target, drafter, num_spec_tokens=3).run([Request(PROMPTS[0], max_new_tokens=25)]))
    whole = result.rounds[0]
    depth = {"static": 3, "dynamic": whole.proposed}[tree]  # the most confident nodes need not be the deepest
    assert whole.accepted == whole.proposed == depth >= 2 and len(whole.emitted) == depth + 1
    nodes = {"static": 8, "dynamic": 7}[tree]
    assert whole.num_draft_tokens == whole.nodes == nodes
    summary = Counts().add(result.rounds[:1]).summary(depth)
    assert summary["num_draft_tokens"] == nodes and summary["num_accepted_draft_tokens"] == depth
    assert summary["acceptance_rate_per_pos"] == [1.0] * depth
    assert summary["draft_acceptance_rate"] == pytest.approx(depth / nodes)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "name", ["medusa", "hydra gru", "hydra prefix trimmed lstm", "eagle3", "eagle3 variant", "lm trimmed"]
)
def test_trees_are_drafted_as_trained(name: str, tree: str) -> None:
    target = make_target("gemma3" if name.startswith("eagle3") else "llama")
    parity = check_parity(target, drafter_of(name, tree, target), PROMPTS)
    assert parity.ok and parity.positions > 20, parity


def test_a_wrong_place_in_the_drafters_own_tree_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, true = make_target(), Followed.add
    monkeypatch.setattr(Followed, "add", lambda self, parents: true(self, parents * 0 + self.width - 1))
    for name in ("eagle3", "lm"):
        assert not check_parity(target, drafter_of(name, "dynamic", target), PROMPTS).ok


def test_impossible_trees_are_refused() -> None:
    for changes, words in (
        ({"tree": "bush"}, "drafter.tree = 'bush'"),
        ({"tree_parents": [0, 2]}, "0 to 1 at place 2"),
        ({"tree_parents": [0, 1, 0]}, "in order of their depth"),
        ({"tree_parents": [0, 1, 2, 3]}, "at most drafter.num_spec_tokens = 3"),
        ({"tree_nodes": 0}, "drafter.tree_nodes = 0"),
        ({"tree_depth": 4}, "drafter.tree_depth = 4"),
        ({"tree_top_k": 0}, "drafter.tree_top_k = 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_config("hydra", **changes)
    cfg = make_config("hydra", tree="static", tree_parents=[0] * 9, draft_vocab_size=8)
    with pytest.raises(ConfigError, match="a node with 9 children, but only 8 ids"):
        build(cfg, make_target(), torch.arange(8))


def test_a_static_shape_that_is_not_chosen_yet_is_a_chain() -> None:
    assert make_drafter("medusa", make_target(), tree="static").tree_shape is None


def test_a_target_whose_attention_goes_by_slots_drafts_chains_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    monkeypatch.setattr(target.model.config, "model_type", "mpt")
    with pytest.raises(ConfigError, match="can't read trees"):
        make_drafter("lm", target, tree="dynamic")
    assert make_drafter("lm", target).tree_shape is None
