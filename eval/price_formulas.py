"""What collecting and training cost, from the shapes of a target and the figures of an accelerator. Measures nothing.

P parameters that a token goes through, H width, V vocabulary, D trimmed vocabulary, N response tokens, b rows that are
answered at a time.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conf.schema import (
    BlockConfig,
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    JumpConfig,
    LmConfig,
    MedusaConfig,
    PriceConfig,
    TargetConfig,
)
from conf.units import parse_bytes
from inference.described import unfilled
from inference.load import load_config, resolve

from .roofline import expert_share

ROW_BYTES = 4.6  # of a store without features, for each response token, prompts included: 535,406 of the default target
ADAM_BYTES = 12  # a trained parameter in a checkpoint: float32 weights and two moments


@dataclass(frozen=True)
class Shape:
    """A target by its configuration: `parameters` in all, `active` ones that a token goes through (a mixture's share,
    no input embedding), those of one `layer`, and `cached` numbers of keys and values that a position leaves."""

    hidden: int
    vocab: int
    parameters: int
    active: int
    layer: int
    cached: int
    itemsize: int

    @classmethod
    def of(cls, cfg: TargetConfig) -> "Shape":
        """From config.json alone. Raises UserError: no such target, or one that can't be run."""
        config = load_config(resolve(cfg.id), cfg)
        model = unfilled(config, cfg)
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        share = expert_share(config)
        layers = _layers(model, config.num_hidden_layers)
        every = sum(p.numel() for p in model.parameters())
        tied = config.tie_word_embeddings
        through = _numbers(model, share) - (0 if tied else embedding.numel())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.hidden_size, head.shape[0], every, round(through), round(_numbers(layers[0], share)),
            2 * heads * dim * len(layers), getattr(torch, cfg.dtype).itemsize,
        )  # fmt: skip


def drafter_parameters(cfg: DrafterConfig, shape: Shape) -> int:
    """About how many parameters of a drafter are trained, its layers being as large as the target's. Lookups: none."""
    square, rows = shape.hidden**2, (cfg.draft_vocab_size or shape.vocab) * shape.hidden
    match cfg:
        case Eagle3Config():  # the taps' fusion, and a layer that reads twice the width
            return shape.layer + 4 * square + rows
        case BlockConfig():  # five taps
            markov = cfg.markov_rank * (shape.vocab + (cfg.draft_vocab_size or shape.vocab))
            return cfg.num_layers * shape.layer + 5 * square + markov
        case LmConfig():
            return cfg.num_layers * shape.layer + rows
        case MedusaConfig():
            return cfg.num_heads * (cfg.num_layers * square + (rows if cfg.own_heads else 0))
        case HydraConfig():  # an inner layer of twice the width, gated, over state and embedding
            return (1 if cfg.share_steps else cfg.num_heads) * 10 * square + (rows if cfg.own_head else 0)
        case EarlyExitConfig():
            return 2 * square + len(cfg.layers) * shape.layer
        case JumpConfig():
            return 4 * square + shape.layer
        case _:
            return 0


def unrolled(cfg: DrafterConfig) -> int:
    """Times that a training step runs the drafter at each position."""
    return int(getattr(cfg, "unroll", 0) or getattr(cfg, "num_heads", 0) or 1)


@dataclass(frozen=True)
class Price:
    """Of one collection and one training. Times in GPU-hours, sizes in bytes."""

    cfg: PriceConfig
    shape: Shape

    @property
    def copy_gpus(self) -> int:
        """GPUs for one copy of the target: weights and one row in nine tenths of their memory."""
        memory = 0.9 * parse_bytes(self.cfg.price.memory, "price.memory")
        return max(1, math.ceil((self.weight_bytes + self.row_bytes) / memory))

    @property
    def weight_bytes(self) -> int:
        """P_all · itemsize."""
        return self.shape.parameters * self.shape.itemsize

    @property
    def row_bytes(self) -> int:
        """Keys and values of one row: cached numbers · context · itemsize."""
        return self.shape.cached * self.cfg.price.context * self.shape.itemsize

    @property
    def rows(self) -> int:
        """b: data.batch, or as many as fit beside the weights."""
        memory = 0.9 * parse_bytes(self.cfg.price.memory, "price.memory") * self.copy_gpus - self.weight_bytes
        return max(1, min(self.cfg.data.batch, int(memory // max(self.row_bytes, 1))))

    @property
    def collect_hours(self) -> float:
        """N / b steps, each the longer of reading (weights + b · keys and values) and of 2 · P · b operations (the
        roofline of Williams, Waterman & Patterson 2009), and 2 · P operations for each prompt token."""
        price, tokens = self.cfg.price, self.cfg.data.response_tokens
        reading = (self.weight_bytes + self.rows * self.row_bytes) / self._bandwidth
        step = max(reading / self.copy_gpus, 2 * self.shape.active * self.rows / self._flops / self.copy_gpus)
        prompts = 2 * self.shape.active * price.prompt_tokens * tokens / self._flops
        return (tokens / self.rows * step * self.copy_gpus + prompts) / 3600

    @property
    def target_hours(self) -> float:
        """The target in training: with recomputed features 2 · P operations for each token of prompt and response in
        every epoch; with cached ones none. Either way its head over the vocabulary: 2 · H · V a response token."""
        tokens, epochs = self.cfg.data.response_tokens, self.cfg.optim.epochs
        head = 2 * self.shape.hidden * self.shape.vocab
        read = 0 if self._cached else 2 * self.shape.active * (1 + self.cfg.price.prompt_tokens)
        return epochs * tokens * (read + head) / self._flops / 3600

    @property
    def drafter_hours(self) -> float:
        """Forward and backward: 6 · (drafter's parameters + H · D of the readout) operations for each response token,
        epoch and unrolled step (Kaplan et al. 2020, section 2.1: two a parameter forward, four backward)."""
        drafter = self.cfg.drafter
        if not drafter.trains:
            return 0.0
        readout = self.shape.hidden * (drafter.draft_vocab_size or self.shape.vocab)
        each = 6 * (drafter_parameters(drafter, self.shape) + readout) * unrolled(drafter)
        return self.cfg.optim.epochs * self.cfg.data.response_tokens * each / self._flops / 3600

    @property
    def disk(self) -> dict[str, int]:
        """Rows: ROW_BYTES · N. Features, where they are cached: H · itemsize · N. Checkpoints: ADAM_BYTES for each of
        the drafter's parameters, of those that are kept and the best. The target: its weights."""
        tokens, kept = self.cfg.data.response_tokens, self.cfg.checkpoint.keep + 1
        checkpoint = ADAM_BYTES * drafter_parameters(self.cfg.drafter, self.shape)
        features = self.shape.hidden * self.shape.itemsize * tokens if self._cached else 0
        return {
            "rows": round(ROW_BYTES * tokens), "features": features, "checkpoints": kept * checkpoint,
            "target": self.weight_bytes,
        }  # fmt: skip

    @property
    def moved(self) -> dict[str, int]:
        """Weights: to every GPU, for each of the two stages. Rows and features: written once, read in every epoch."""
        disk, copies = self.disk, self.cfg.price.gpus // self.copy_gpus or 1
        times = 1 + self.cfg.optim.epochs
        found = {"weights": 2 * copies * self.weight_bytes}
        return found | {name: round(times * disk[name]) for name in ("rows", "features")}

    @property
    def _cached(self) -> bool:
        return self.cfg.data.features.value == "cache"

    @property
    def _flops(self) -> float:
        """Operations a second that one GPU reaches."""
        return self.cfg.price.utilisation * self.cfg.price.tflops * 1e12

    @property
    def _bandwidth(self) -> float:
        return self.cfg.price.utilisation * self.cfg.price.tb_per_s * 1e12


def _layers(model: Any, count: int) -> nn.ModuleList:
    found = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(found)


def _numbers(module: nn.Module, share: float) -> float:
    """Parameters, of experts their share."""
    return sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in module.named_parameters())
