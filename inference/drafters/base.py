"""Drafter: what proposes tokens for the target. Every kind has the same members in the same order."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..adaptive import Adaptive, Pace
from ..batch import Batch
from ..cache import SlotCache
from ..sampling import SamplingRows, draw, process, uniforms
from ..tree import Shape, Tree
from .pool import Pool
from .taps import served, take

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .lookup import Lookup


@dataclass(frozen=True)
class Resume:
    """The target's own work, done while drafting: states [B,1+K,H] of the pending token and of every draft token
    after its first `layer` layers, whose keys and values lie in the target's cache. Verification goes on from there.
    """

    states: Tensor
    layer: int


@dataclass
class Draft:
    """tokens [B,K] int64; counts [B]: valid draft tokens of each row; probs [B,K,V]: the distributions the tokens
    were really drawn from, None when they are deterministic (one-hot). sources: who drafted each row.
    logits [B,K,D]: the drafter's raw logits, for the parity check. resume: where verification goes on.
    tree: of several candidates a position, token k being its node k + 1; nothing about it may depend on what is drawn
    later. Siblings have the same probs; a later one was drawn without the earlier. None: a chain.
    confidence [B,K]: of a tree, how probable its drafter thinks that the path to each node is the text.
    """

    tokens: Tensor
    counts: Tensor
    probs: Tensor | None = None
    sources: list[str] | None = None
    logits: Tensor | None = None
    resume: Resume | None = None
    tree: Tree | None = None
    confidence: Tensor | None = None


@dataclass
class Context:
    """What a drafter may see at the start of a round.

    rows: all ids of each row, prompt included; the last one is pending: emitted, not yet in the target's cache.
    last [B]: those pending ids; hidden [B,H]: the target's last hidden state that predicted them.
    live: rows that still generate (the others' drafts are ignored).
    cache: the target's, for drafters that run its layers: a draft may write beyond `lengths`, and leaves them as
    they were. room: draft tokens that the text and the positions leave room for; only a lookup's draft may be longer
    than what was asked for, and then no longer than this.
    pace: when drafts end because more of them does not pay; None: never.
    """

    rows: list[list[int]]
    last: Tensor
    hidden: Tensor
    live: list[bool]
    cache: SlotCache | None = None
    room: int = sys.maxsize
    pace: Pace | None = None


@dataclass
class Features:
    """What the target computed at positions that stay in its cache: the prompt's, then each round's kept ones.

    tokens [r,N] at positions starts[i] .. starts[i] + counts[i] - 1 of row i, and the drafter's taps [r,N,H] there;
    what lies past counts[i] is padding or a rejected draft.
    """

    tokens: Tensor
    taps: tuple[Tensor, ...]
    starts: Sequence[int]
    counts: Sequence[int]


class TrainOutput(NamedTuple):
    """logits [B,A,K,D] of a training forward, and of a confidence head [B,A,K], where the drafter has one: how
    probable it thinks that the token is accepted, all earlier ones being accepted."""

    logits: Tensor
    confidence: Tensor | None = None


class Drafter(nn.Module, ABC):
    """A strategy with verbs in the loop (`start`, `observe`, `draft`) and one in training (`train_logits`)."""

    kind: str
    trainable: bool = True
    taps: tuple[int, ...] = ()  # the target's hidden_states it reads, at every position: see `observe`, Batch.taps
    num_steps: int  # K of train_logits
    endless: bool = False  # K = 1, and step j at anchor a is the step at anchor a + j
    context: int | None = None  # positions of its own model; None: only the target's count
    makes_trees: bool = False
    tree_shape: Shape | None = None  # of its drafts; None: chains
    at_once: bool = False  # a draft of one token costs as much as one of many
    adaptive: Adaptive | None = None  # its chains end when they no longer pay; None: they have the length asked for
    draft_ids: Tensor | None  # trimmed vocabulary [D] -> target ids; None: the full vocabulary
    rule: "Lookup | None" = None  # of its lookup, which goes first
    pool: Pool | None = None  # earlier outputs that its lookup searches

    def __init__(self, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @abstractmethod
    def start(self, batch: int) -> Any:
        """Decoding state for `batch` rows."""

    def admit(self, state: Any, rows: Sequence[int]) -> None:
        """Forget what `state` holds of `rows`: new requests take their places."""

    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep only `rows` of `state`, in this order."""

    def observe(self, state: Any, rows: Sequence[int], features: Features) -> None:
        """Take in what the target says about new positions of `rows`: after their prefill (the whole prompt) and
        after every verification (the pending token and the accepted drafts), each position once and in order.
        """

    @property
    def chain(self) -> "Drafter":
        """What drafts where a lookup found nothing: the drafter itself, but of a hybrid its trained part."""
        return self

    def longest(self, k: int) -> int:
        """Draft lengths worth sweeping: all the heads there are; twice `k` for endless chains and lookups."""
        return self.num_steps if self.num_steps > 0 and not self.endless else 2 * k

    @property
    def train_taps(self) -> tuple[int, ...]:
        """The taps that `train_logits` wants in Batch.taps."""
        return self.taps

    @property
    def cached_taps(self) -> tuple[int, ...]:
        """The taps that `train_logits` reads from Batch.taps when they are there: worth keeping beside a store."""
        return self.train_taps

    @abstractmethod
    def draft(
        self, state: Any, ctx: Context, k: int, sampling: SamplingRows, generator: torch.Generator
    ) -> Draft:
        """Propose up to k tokens a row; a lookup, as many as its rule says, up to ctx.room."""

    def train_logits(self, batch: Batch) -> Tensor:
        """[B, A, K, D] with A = R - 1: entry (b, a, k) drafts response token a + 1 + k, seeing the target's state
        at response index a and the true response tokens up to index a + k. Its teacher is the target's
        distribution at response index a + 1 + k. A drafter that chooses anchors returns those of batch.anchors.
        """
        raise TypeError(f"a {self.kind} drafter is not trained")

    def train_output(self, batch: Batch) -> TrainOutput:
        """train_logits and what else is trained on them."""
        return TrainOutput(self.train_logits(batch))

    def confidence(self, said: TrainOutput) -> Tensor:
        """[B,A,K] of a training forward: how sure it is of each token, in [0, 1], as its steps in the loop are."""
        return top_probability(said.logits)

    def choose_anchors(self, batch: Batch) -> Batch:
        """The batch with the anchors of one training step, drawn from torch's global generator; default: all."""
        return batch

    @property
    def model_config(self) -> "PretrainedConfig | dict[str, Any] | None":
        """config.json beside the weights: of the model that drafts, or for the engines that load the tensors as they
        are; None for kinds without either."""
        return None

    def parameters_to_save(self) -> dict[str, Tensor]:
        """Trained tensors by name, as they are served; what the target holds itself is left out."""
        return served(self)

    def take_saved(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `parameters_to_save`."""
        take(self, tensors)



def spread(probs: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Distributions over a trimmed vocabulary [..., D] -> over the target's [..., V], zero elsewhere."""
    if draft_ids is None:
        return probs
    full = probs.new_zeros(*probs.shape[:-1], vocab_size)
    return full.index_copy_(-1, draft_ids, probs)


def choose(
    logits: Tensor, sampling: SamplingRows, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Draw one draft token a row from logits [B,D]: indices [B] and the distribution [B,D] drawn from.

    All rows greedy: the argmax and None (a deterministic draft).
    """
    if sampling.greedy:
        return logits.argmax(-1), None
    probs = process(logits[:, None], sampling.unpenalised)[:, 0]
    return draw(probs, uniforms((logits.shape[0],), generator, logits.device)), probs


def top_probability(logits: Tensor) -> Tensor:
    """Of the likeliest token at temperature 1: logits [..., D] -> [...]."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1).amax(-1)


class Chain:
    """Collects the steps of a chain into a Draft. pace: when it ends before all steps are made."""

    def __init__(self, draft_ids: Tensor | None, vocab_size: int, kind: str, pace: Pace | None = None) -> None:
        self.draft_ids, self.vocab_size, self.kind = draft_ids, vocab_size, kind
        self.pace = pace if pace is not None and pace.reads else None  # nobody asks what is only heard
        self.tokens: list[Tensor] = []
        self.probs: list[Tensor] = []
        self.logits: list[Tensor] = []

    @property
    def ended(self) -> bool:
        """Whether another step does not pay, by what was known before the newest token was drawn."""
        return self.pace is not None and self.pace.ended

    def step(
        self, logits: Tensor, sampling: SamplingRows, generator: torch.Generator, confidence: Tensor | None = None
    ) -> Tensor:
        """Draw the next draft token from logits [B,D]; returns its target ids [B]. confidence [B]: how sure the drafter
        is of it, in [0, 1]; None: the probability of the likeliest one."""
        if self.pace is not None:
            self.pace.hear(self.pace.chances(top_probability(logits) if confidence is None else confidence))
        index, probs = choose(logits, sampling, generator)
        token = index if self.draft_ids is None else self.draft_ids[index]
        self.tokens.append(token)
        self.logits.append(logits)
        if probs is not None:
            self.probs.append(spread(probs, self.draft_ids, self.vocab_size))
        return token

    def draft(self) -> Draft:
        """All steps so far."""
        tokens = torch.stack(self.tokens, 1)
        counts = torch.full((tokens.shape[0],), tokens.shape[1], device=tokens.device)
        probs = torch.stack(self.probs, 1) if self.probs else None
        return Draft(tokens, counts, probs, [self.kind] * len(counts), torch.stack(self.logits, 1))
