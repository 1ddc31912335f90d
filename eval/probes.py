"""α before training, from linear probes: what a kind of drafter reads of the target, mapped by a ridge regression to
the state that its next draft token depends on, and read out by the target's own head.

A probe is fitted on one half of the target's texts (prompts too) and tried on the other half, and the other way round.
It is a floor: training sees more tokens, and drafters are not linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conf.schema import (
    BlockConfig,
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    HydraConfig,
    JumpConfig,
    LmConfig,
    MedusaConfig,
)
from inference.batch import right_padded, similar_lengths
from inference.drafters.block import default_taps
from inference.drafters.eagle3_model import taps_of
from inference.drafters.heads import Readout
from inference.drafters.ranges import jump_layers
from inference.shortcuts import scaled, shortcut
from inference.target import Target
from inference.tuning import Text

STEPS = 3  # draft tokens that are probed; later ones are taken to be accepted as often as the last of these
POSITIONS = 4096  # of a fit, at most
READ_OUT = 4096  # ids that a probe may propose: those of the texts, and the lowest


@dataclass(frozen=True)
class Probe:
    """What it reads: the mean of the `taps` (hidden_states) at the position that predicted the pending token, and with
    `tokens` the embedding of the token before the drafted one; with `here` the taps at that token's own position, which
    a drafter that runs layers of the target over it reaches."""

    taps: tuple[int, ...]
    tokens: bool = True
    here: bool = False


def probe_of(cfg: DrafterConfig, target: Target) -> Probe | None:
    """None for kinds that read nothing of the target. Raises ConfigError for layers that the target doesn't have."""
    count, name = target.num_layers, target.name
    match cfg:
        case MedusaConfig():
            return Probe((count,), tokens=False)
        case HydraConfig():
            return Probe((count,))
        case Eagle3Config():
            return Probe(taps_of(cfg.taps, count, name))
        case BlockConfig():
            return Probe(tuple(cfg.taps or default_taps(count)))
        case JumpConfig():
            return Probe((jump_layers(cfg, count, name)[0],))
        case EarlyExitConfig():
            return Probe((int(cfg.exit_layer),), tokens=False, here=True)
        case LmConfig() if cfg.model is None:
            return Probe((min(len(cfg.layers) or cfg.num_layers, count - 1),), tokens=False, here=True)
    return None


@dataclass
class Reading:
    """The target's states over its texts: tapped ones [T,H] in their own scale, the last [T,H], and its choices [T]
    after each position, all by text."""

    target: Target
    texts: Sequence[Text]
    taps: list[dict[int, Tensor]] = field(default_factory=list)
    last: list[Tensor] = field(default_factory=list)
    choices: list[Tensor] = field(default_factory=list)

    @classmethod
    @torch.no_grad()
    def of(cls, target: Target, texts: Sequence[Text], taps: Sequence[int]) -> "Reading":
        """Read every text once."""
        rows = [[*text.record.prompt, *text.record.tokens] for text in texts]
        states: dict[int, tuple[dict[int, Tensor], Tensor]] = {}
        for group in similar_lengths([len(row) for row in rows]):
            lengths = [len(rows[i]) for i in group]
            tokens = right_padded([rows[i] for i in group]).to(target.device)
            read = target.read(tokens, torch.tensor(lengths), taps)
            for place, (i, n) in enumerate(zip(group, lengths, strict=True)):
                tapped = {t: scaled(tap[place, :n]) for t, tap in zip(taps, read.taps, strict=True)}
                states[i] = tapped, read.last[place, :n].clone()
        ordered = [states[i] for i in range(len(rows))]
        choices = [target.head(last).argmax(-1) for _, last in ordered]
        return cls(target, texts, [t for t, _ in ordered], [last for _, last in ordered], choices)

    def ids(self, text: int) -> Tensor:
        """Its tokens, prompt and response [T]."""
        record = self.texts[text].record
        return torch.tensor([*record.prompt, *record.tokens], device=self.target.device)

    def vocabulary(self) -> Tensor | None:
        """Ids that are read out; None: all."""
        if self.target.vocab_size <= READ_OUT:
            return None
        used = torch.cat([*(self.ids(i) for i in range(len(self.texts))), *self.choices]).unique()
        mask = torch.zeros(self.target.vocab_size, dtype=torch.bool, device=used.device)
        mask[used] = True
        mask[: max(0, READ_OUT - len(used))] = True
        return mask.nonzero().squeeze(1)


@torch.no_grad()
def agreements(reading: Reading, probe: Probe, steps: int = STEPS) -> list[Tensor]:
    """Of every text [A,steps] float64, A = R - 1: whether the probe's choice for draft token j + 1 at anchor a is the
    target's own, given the text before it. Zero past the end of the text."""
    target, count = reading.target, len(reading.texts)
    ids = reading.vocabulary()
    readout = Readout(target, ids)
    out = [torch.zeros(len(t.record.tokens) - 1, steps, dtype=torch.float64) for t in reading.texts]
    for step in range(1 if probe.here else steps):
        offset = 0 if probe.here else step + 1
        for half in (0, 1):
            fitted = _fit(reading, probe, offset, range(half, count, 2))
            for i in range(1 - half, count, 2):
                start, response = len(reading.texts[i].record.prompt), len(out[i])
                places = torch.arange(start + step, start + response, device=target.device)  # predicting positions
                inputs = _inputs(reading, probe, offset, i)[places - offset]
                drafted = readout((inputs @ fitted).to(target.dtype)).argmax(-1)
                agree = (drafted if ids is None else ids[drafted]) == reading.choices[i][places]
                out[i][: response - step, step] = agree.double().cpu()
    for text in out if probe.here else []:  # a later step is the first one of a later anchor
        for step in range(1, steps):
            text[: len(text) - step, step] = text[step:, 0]
    return out


def _inputs(reading: Reading, probe: Probe, offset: int, text: int) -> Tensor:
    """[T - offset, d]: row i is read to predict the last state at position i + offset."""
    taps = torch.stack([reading.taps[text][tap] for tap in probe.taps]).mean(0)
    taps = taps[: len(taps) - offset]
    if not probe.tokens:
        return taps
    embedded = scaled(reading.target.embed(reading.ids(text)))[offset:]
    return torch.cat([taps, embedded.to(taps)], -1)


def _fit(reading: Reading, probe: Probe, offset: int, texts: Sequence[int]) -> Tensor:
    """The map [d,H] fitted on some texts."""
    inputs = torch.cat([_inputs(reading, probe, offset, i) for i in texts])
    wanted = torch.cat([reading.last[i][offset:] for i in texts])
    chosen = torch.linspace(0, len(inputs) - 1, min(len(inputs), POSITIONS), device=inputs.device).long()
    return shortcut(inputs[chosen], wanted[chosen])


def first_rate(agreed: Sequence[Tensor]) -> float:
    """α of the first draft token over all anchors [A,K] of all texts."""
    first = torch.cat([a[:, 0] for a in agreed])
    return float(first.mean()) if len(first) else 0.0
