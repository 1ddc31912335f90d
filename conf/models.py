"""The target and the kinds of drafters. `__post_init__` refuses nonsense with the key's full path."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from .adaptive import AdaptiveSettings
from .errors import require
from .lookups import LookupKind, LookupSettings

MOST_NODES = 256  # of a tree
DTYPES = ("float32", "float64", "bfloat16", "float16")
LAYER_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters")


@dataclass
class TargetConfig:
    """The model whose output must not change. `id`: embedded, tiny, a hub id or a folder."""

    id: str = "embedded"
    revision: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    kernel: str = "auto"  # auto | on | off: the own CPU kernel with fused linears (float32)
    trust_remote_code: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.id), "target.id", self.id, "embedded, tiny, a hub id or a folder")
        require(self.dtype in DTYPES, "target.dtype", self.dtype, ", ".join(DTYPES))
        require(self.kernel in ("auto", "on", "off"), "target.kernel", self.kernel, "auto, on, off")


@dataclass
class DrafterConfig(LookupSettings, AdaptiveSettings):
    """Base of all drafter kinds."""

    kind: str = MISSING
    num_spec_tokens: int = 3
    tune_length: bool = False  # choose num_spec_tokens when training ends: for speed, on the choosing prompts
    folder: str | None = None  # evaluate or continue an existing drafter folder
    warm_start: str | None = None  # train from the weights and the vocabulary of an earlier drafter's folder
    dtype: str = "float32"
    draft_vocab_size: int = 0  # trimmed vocabulary of a trained kind; 0: the full one

    def __post_init__(self) -> None:
        LookupSettings.__post_init__(self)
        AdaptiveSettings.__post_init__(self)
        own = type(self).kind
        require(self.kind == own, "drafter.kind", self.kind, f"{own}; choose a kind with drafter=<kind>")
        require(1 <= self.num_spec_tokens <= 64, "drafter.num_spec_tokens", self.num_spec_tokens, "1 to 64")
        require(self.dtype in DTYPES, "drafter.dtype", self.dtype, ", ".join(DTYPES))
        require(self.draft_vocab_size >= 0, "drafter.draft_vocab_size", self.draft_vocab_size, "0 (full) or more")
        alone = self.warm_start is None or (self.folder is None and not isinstance(self, LookupConfig))
        require(alone, "drafter.warm_start", self.warm_start, "null beside drafter.folder and for prompt lookups")

    @property
    def trains(self) -> bool:
        """Whether anything of it is trained."""
        return True

    @property
    def needs_no_folder(self) -> bool:
        """Whether its configuration is all there is of it."""
        return False


@dataclass
class LookupConfig(DrafterConfig):
    """What the kinds that only look up share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        only = f"{self.kind}; choose the other with drafter={self.lookup_kind}"
        require(self.lookup_kind == self.kind, "drafter.lookup_kind", str(self.lookup_kind), only)

    @property
    def trains(self) -> bool:
        """Nothing is."""
        return False

    @property
    def needs_no_folder(self) -> bool:
        """Unless it has a pool of earlier outputs."""
        return not self.wants_pool

    @property
    def looks_up(self) -> bool:
        """It does nothing else."""
        return True


@dataclass
class NgramConfig(LookupConfig):
    """Prompt lookup alone: continue the latest earlier occurrence of the last n tokens, longest n first."""

    kind: str = "ngram"


@dataclass
class SuffixConfig(LookupConfig):
    """Suffix lookup alone: an automaton of the request, and a pool of earlier outputs."""

    kind: str = "suffix"
    num_spec_tokens: int = 8
    lookup_kind: LookupKind = LookupKind.suffix
    lookup_per_match: float | None = 1.5
    max_match: int = 16
    min_match: int = 1
    pool_match: int | None = 1


@dataclass
class TreeConfig(DrafterConfig):
    """Kinds that can draft trees, no deeper than num_spec_tokens. A trained drafter has the tree that was saved with
    it, unless `tree` is chain, or static or dynamic with tune_tree=false."""

    tree: str | None = None  # null or chain; static: a fixed shape; dynamic: the most confident nodes of every round
    tree_parents: list[int] = field(default_factory=list)  # static: of nodes 1, 2, ... (0: the pending token)
    tree_nodes: int = 8  # dynamic: draft tokens of a round
    tree_depth: int = 0  # dynamic: 0: num_spec_tokens
    tree_top_k: int = 4  # dynamic: nodes followed at each depth, and children looked at of each
    tune_tree: bool = True  # choose shape, nodes and depth anew on the choosing prompts when training ends

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = (None, "chain", "static", "dynamic")
        require(self.tree in kinds, "drafter.tree", self.tree, "null, chain, static, dynamic")
        chain = self.adaptive in (None, "off") or self.tree in (None, "chain")
        require(chain, "drafter.adaptive", self.adaptive, f"null or off beside drafter.tree = {self.tree}")
        depths = [0]
        for number, parent in enumerate(self.tree_parents, 1):
            before = f"0 to {number - 1} at place {number}: a node comes after its parent"
            require(0 <= parent < number, "drafter.tree_parents", self.tree_parents, before)
            depths.append(depths[parent] + 1)
        require(depths == sorted(depths), "drafter.tree_parents", self.tree_parents, "nodes in order of their depth")
        deep = f"paths of at most drafter.num_spec_tokens = {self.num_spec_tokens} nodes"
        require(depths[-1] <= self.num_spec_tokens, "drafter.tree_parents", self.tree_parents, deep)
        require(len(self.tree_parents) <= MOST_NODES, "drafter.tree_parents", self.tree_parents, f"<= {MOST_NODES}")
        require(1 <= self.tree_nodes <= MOST_NODES, "drafter.tree_nodes", self.tree_nodes, f"1 to {MOST_NODES}")
        upto = f"0 to drafter.num_spec_tokens = {self.num_spec_tokens}"
        require(0 <= self.tree_depth <= self.num_spec_tokens, "drafter.tree_depth", self.tree_depth, upto)
        require(1 <= self.tree_top_k <= MOST_NODES, "drafter.tree_top_k", self.tree_top_k, f"1 to {MOST_NODES}")


@dataclass
class HeadsConfig(TreeConfig):
    """What Medusa and Hydra heads share."""

    draft_vocab_size: int = 4096
    num_heads: int = 3
    num_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.num_heads <= 64, "drafter.num_heads", self.num_heads, "1 to 64")
        require(self.num_layers >= 1, "drafter.num_layers", self.num_layers, ">= 1")
        fits = self.num_spec_tokens <= self.num_heads or self.folder is not None  # a folder has heads of its own
        require(fits, "drafter.num_spec_tokens", self.num_spec_tokens, f"1 to drafter.num_heads = {self.num_heads}")


@dataclass
class MedusaConfig(HeadsConfig):
    """Medusa heads: parallel residual blocks on the last hidden state."""

    kind: str = "medusa"
    own_heads: bool = False  # train an output matrix for each head instead of reading out by the target's


@dataclass
class HydraConfig(HeadsConfig):
    """Hydra heads: a chain over the last hidden state and the embeddings of the tokens drafted so far."""

    kind: str = "hydra"
    chain: str = "mlp"  # mlp | gru | lstm: what a step of the chain is
    inner_size: int = 0  # width of its inner layer; 0: twice the target's width (mlp), the target's (gru, lstm)
    share_steps: bool = True  # one block for all steps, or one for each
    prefix_attention: bool = False  # start at a decoder layer over the whole prefix (Hydra++)
    taps: list[int] = field(default_factory=list)  # hidden_states mixed into the start, beside the last
    own_head: bool = False  # train head rows of its own instead of reading out by the target's

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chain in ("mlp", "gru", "lstm"), "drafter.chain", self.chain, "mlp, gru, lstm")
        require(self.inner_size >= 0, "drafter.inner_size", self.inner_size, "0 (a multiple of the target's) or more")


@dataclass
class Eagle3Config(TreeConfig):
    """EAGLE-3: one decoder layer over fused taps of the target, trained on its own outputs."""

    kind: str = "eagle3"
    draft_vocab_size: int = 4096
    unroll: int = 5  # steps of the training-time test
    own_tokens: float = 0.0  # share of its later steps that read the drafter's own token, not the response's
    inner_size: int = 0  # width of the layer's MLP; 0: the target's
    taps: list[int] = field(default_factory=list)  # hidden_states read; []: [2, N//2, N-3], as engines expect
    # What layers of other trainers have, beyond the published one. vLLM and speculators know all of it.
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_before_fc: bool = False  # one norm over all taps before they are fused
    fc_norm: bool = False  # a norm for each tap instead
    norm_output: bool = False  # the final norm's output is fed back, not its input
    qk_norm: bool = False  # norms of queries and keys, head by head
    own_embedding: bool = False  # token embeddings of its own, trained; they start as the target's
    layer: dict[str, Any] = field(default_factory=dict)  # LAYER_KEYS that differ from the target's, as in config.json

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.unroll <= 64, "drafter.unroll", self.unroll, "1 to 64")
        one = not (self.norm_before_fc and self.fc_norm)
        require(one, "drafter.fc_norm", self.fc_norm, "false beside drafter.norm_before_fc: taps are normed once")
        require(set(self.layer) <= set(LAYER_KEYS), "drafter.layer", self.layer, f"keys {', '.join(LAYER_KEYS)}")
        require(0 <= self.own_tokens <= 1, "drafter.own_tokens", self.own_tokens, "0 to 1")
        require(self.inner_size >= 0, "drafter.inner_size", self.inner_size, "0 (the target's) or more")
        steps = f"1 to drafter.unroll = {self.unroll}"
        require(self.num_spec_tokens <= self.unroll, "drafter.num_spec_tokens", self.num_spec_tokens, steps)
