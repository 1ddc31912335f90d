"""Which layers of the target a small LM is cut out of: a greedy search by measured acceptance.

One layer after the other is taken, each time the one with which the cut, untrained, is nearest to the target: by
α = Σ min(p, q) over response positions of the store, since the two argmax hardly ever agree that early.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from conf.digest import digest_of
from conf.errors import UserError, require
from conf.paths import read_json, write_json
from conf.schema import LmConfig, RunConfig
from data.loader import Loader
from data.store import Store
from inference.batch import Batch
from inference.drafters.heads import Readout
from inference.drafters.unroll import at_positions, pending_positions
from inference.layers import LayerStack
from inference.parity import with_hidden
from inference.target import Target

from .objectives import Comparison
from .step import Sums, chunks, count_positions
from .teacher import Norms, TargetTeacher

FILE = "layers.json"
RESPONSE = 256  # response tokens of a batch: small ones meet the budget closely


@dataclass(frozen=True)
class Cut:
    """A set of layers that was tried: α and argmax agreement with the target, untrained."""

    layers: list[int]
    alpha: float
    agreement: float


def choose_layers(
    cfg: RunConfig, drafter: LmConfig, path: Path, target: Target, store: Store, ids: Tensor | None
) -> None:
    """Write run_dir/layers.json, unless it is there: a run that is resumed keeps its layers. ids [D]: the trimmed
    vocabulary. Raises ConfigError for a budget that is too small, UserError for layers that can't be run alone.
    """
    of_rows = {"rows": store.rows_digest, "seed": cfg.seed}
    digest = digest_of({"target": target.identity, "drafter": drafter, **of_rows})
    if read_json(path / FILE).get("digest") == digest:
        return
    search = Search(cfg, drafter, target, store, ids)
    chosen: list[int] = []
    for _ in range(drafter.num_layers):
        chosen = search.extended(chosen)
    print(f"layers {chosen} of {target.num_layers}: {search.described()}", flush=True)
    tried = [asdict(cut) for cut in search.tried]
    write_json(path / FILE, {"digest": digest, "layers": chosen, "tokens": search.tokens, "tried": tried})


def chosen_layers(path: Path) -> list[int]:
    """What `choose_layers` wrote."""
    return [int(i) for i in read_json(path / FILE)["layers"]]


class Search:
    """The rows of the store that every set of layers reads, and what was found."""

    def __init__(self, cfg: RunConfig, drafter: LmConfig, target: Target, store: Store, ids: Tensor | None) -> None:
        self.target, self.stack = target, stack_of(target)
        self.budget, self.tokens, self.tried = drafter.search_tokens, 0, list[Cut]()
        self.teacher, self.readout = TargetTeacher(target, ids), Readout(target, ids)
        sets = sum(target.num_layers - taken for taken in range(drafter.num_layers))
        loader = Loader(store, batch_tokens=RESPONSE, seed=cfg.seed, device=target.device)
        self.batches = [self._taught(batch) for batch in within(loader, self.budget, sets)]
        self.positions = sum(int(batch.supervised(1).sum()) for batch, _ in self.batches)

    def extended(self, chosen: Sequence[int]) -> list[int]:
        """`chosen` and the layer that serves best beside them, the first one of equals; says what was tried."""
        rest = [i for i in range(self.target.num_layers) if i not in chosen]
        cuts = [self.measure(sorted([*chosen, i])) for i in rest]
        self.tried += cuts
        print("α of " + ", ".join(f"{cut.layers} {cut.alpha:.3f}" for cut in cuts), flush=True)
        return max(cuts, key=lambda cut: cut.alpha).layers

    @torch.no_grad()
    def measure(self, layers: list[int]) -> Cut:
        """A cut over all batches."""
        sums = Sums.zeros(1, self.target.device)
        for batch, norms in self.batches:
            self.tokens += batch.tokens.numel()
            logits, mask = self.readout(self.states(batch, layers))[:, :, None], batch.supervised(1)
            for part in chunks(logits):
                comparison = Comparison(logits[part], self.teacher.at(batch, norms, part, 1))
                count_positions(sums, comparison, -comparison.log_alpha, mask[part])
        found = sums.metrics()
        return Cut(layers, found["alpha_per_pos"][0], found["agreement_per_pos"][0])

    def states(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """[B,A,H]: what the head reads at every anchor when only these layers run."""
        rows, width = batch.tokens.shape
        positions = torch.arange(width, device=batch.tokens.device).expand(rows, -1)
        frame, state = self.stack.frame(positions, self.target.masks(positions, width)), self.stack.enter(batch.tokens)
        for index in layers:
            state = self.stack.call(self.target.layers[index], index, state, frame, None)
        return self.stack.norm(at_positions(state, pending_positions(batch)))

    def described(self) -> str:
        """For people."""
        best = max(self.tried, key=lambda c: (len(c.layers), c.alpha))
        return (
            f"of {len(self.tried)} sets that were tried the nearest to the target, untrained (α {best.alpha:.3f}, "
            f"agreement {best.agreement:.3f} over {self.positions:,} positions; {self.tokens:,} of at most "
            f"{self.budget:,} tokens read)"
        )

    def _taught(self, batch: Batch) -> tuple[Batch, Norms]:
        batch = with_hidden(self.target, batch)
        return batch, self.teacher.norms(batch)


def within(loader: Loader, budget: int, sets: int) -> list[Batch]:
    """The first batches of an epoch that `sets` sets of layers can read for at most `budget` tokens in all.

    Raises ConfigError when it is too little for one.
    """
    batches, tokens = [], 0
    for batch in loader.epoch():
        tokens += batch.tokens.numel()
        if tokens * sets > budget:
            break
        batches.append(batch)
    least = f"{tokens * sets} or more: {sets} sets of layers are tried, and a batch has {tokens} tokens"
    require(len(batches) > 0, "drafter.search_tokens", budget, least)
    return batches


def stack_of(target: Target) -> LayerStack:
    """The target's layers. Raises UserError when they can't be run one by one."""
    try:
        return target.stack
    except UserError as error:
        raise UserError(f"drafter.init = search can't be done ({error}); use even, first or drafter.layers") from error
