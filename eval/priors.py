"""What to expect of a kind of drafter before anything of it was measured: wide guesses, with where they come from.

`small` is what a trial of 50,000 response tokens and 80 to 170 s of training reached on a 135M target (greedy agreement
at the first draft token, from its tokens a round at γ = 1; exits and jumps: guessed). `large` is roughly what the
papers named beside them show for targets of 7B and more after 10^8 tokens and more. Between the two α is taken to grow
with the logarithm of the tokens. All of this is a guess, and so is the width of the interval: what was measured, even a
linear probe, goes first (evidence.py).
"""

import math

SMALL_TOKENS, LARGE_TOKENS = 5e4, 1e8
PRIORS = {  # kind: (small, large, what a later draft token keeps of the rate before it)
    "medusa": (0.19, 0.60, 0.75),  # arXiv:2401.10774
    "hydra": (0.30, 0.68, 0.92),  # arXiv:2402.05109
    "eagle3": (0.23, 0.76, 0.97),  # arXiv:2503.01840: its training-time test keeps the rate nearly flat over positions
    "block": (0.15, 0.78, 0.93),  # arXiv:2602.06036
    "lm": (0.20, 0.65, 0.97),  # arXiv:2211.17192: pairs of models 20 to 100 times apart
    "early_exit": (0.20, 0.50, 0.98),  # arXiv:2404.16710, for a target that was not trained to be left early
    "jump": (0.25, 0.60, 0.95),  # between an exit, whose layers it has, and Hydra
}
UNKNOWN = (0.15, 0.60, 0.9)
WIDTH = 0.7  # in log-odds: 0.30 becomes [0.18, 0.46]


def prior(kind: str, response_tokens: int) -> tuple[float, float]:
    """(α of the first draft token, what a later token keeps of the rate before it) after so many response tokens."""
    small, large, keeps = PRIORS.get(kind, UNKNOWN)
    share = math.log(max(response_tokens, 1) / SMALL_TOKENS) / math.log(LARGE_TOKENS / SMALL_TOKENS)
    return small + (large - small) * min(max(share, 0.0), 1.0), keeps


def widened(alpha: float, width: float = WIDTH) -> tuple[float, float]:
    """(low, high): alpha with `width` less and more in log-odds."""
    alpha = min(max(alpha, 1e-3), 1 - 1e-3)
    odds = math.log(alpha / (1 - alpha))
    return 1 / (1 + math.exp(width - odds)), 1 / (1 + math.exp(-width - odds))
