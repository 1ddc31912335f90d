"""The state of recurrent layers beside a cache's slots: gated delta nets, Mamba-2, short convolutions.

Numbers can't roll it back. Settled is the state after each row's tokens; a forward moves a copy of it on. Where all
of its tokens are kept the copy is settled; where some are, the layers' mixers alone read those again from the settled
state, rows that keep as many together: padding would move a state on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

if TYPE_CHECKING:
    from .cache import SlotCache

KINDS = ("conv_states", "recurrent_states")
State = dict[tuple[str, int], Tensor]  # [B, ...] each, by what transformers calls them
HERE = object()  # stands where a call had the cache


class StateLayer(LinearAttentionLayer):
    """One recurrent layer. settled: {} before any row has tokens; replaced, never written to, so that it can be kept.

    What transformers' modules read and write is the copy of the forward that is going on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settled: State = {}

    def begin(self, empty: Sequence[int] = ()) -> None:
        """Let a forward go on from the settled state, rows `empty` from none."""
        if empty and self.settled:
            zeros = {key: torch.zeros_like(tensor[:1]) for key, tensor in self.settled.items()}
            self.settle([(empty, zeros)], len(next(iter(self.settled.values()))))
        for kind in KINDS:
            for number in range(self.number_of_states):
                tensor = self.settled.get((kind, number))
                getattr(self, kind)[number] = None if tensor is None else tensor.clone()
                getattr(self, f"is_{kind}_initialized")[number] = tensor is not None
                if tensor is not None and kind == KINDS[0]:
                    self.conv_kernel_size[number] = tensor.shape[-1]
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), bool(self.settled))

    def moved(self) -> State:
        """The state that the forward left; {}: it was not read or written."""
        numbered = {(kind, number): t for kind in KINDS for number, t in getattr(self, kind).items()}
        return {key: tensor for key, tensor in numbered.items() if tensor is not None}

    def settle(self, parts: Sequence[tuple[Sequence[int], State]], batch: int) -> None:
        """Of each part's rows its state [len(rows) or 1, ...] is what holds."""
        settled = {
            key: self.settled[key].clone() if self.settled else tensor.new_zeros(batch, *tensor.shape[1:])
            for key, tensor in parts[0][1].items()
        }
        for rows, state in parts:
            for key, tensor in state.items():
                settled[key][list(rows)] = tensor
        self.settled = settled


@dataclass(frozen=True)
class Call:
    """A mixer's call over shape = (B, N) tokens, to be made again over fewer."""

    module: nn.Module
    shape: tuple[int, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self, rows: Sequence[int], n: int, cache: Cache) -> None:
        """Over the first n tokens of `rows`, whose states `cache` holds."""

        def less(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape[:2] == self.shape:
                return value[list(rows), :n]
            return cache if value is HERE else value

        self.module(*map(less, self.args), **{name: less(value) for name, value in self.kwargs.items()})


class States:
    """The recurrent layers of a cache by index, of `total` layers; calls: of their mixers in the newest forward."""

    def __init__(self, layers: dict[int, StateLayer], total: int) -> None:
        self.layers, self.total = layers, total
        self.calls: list[Call] = []
        self.shape = (0, 0)

    def begin(self, lengths: Sequence[int], n: int) -> None:
        """Prepare a forward over n tokens a row. Rows of length 0 start from no state."""
        self.calls, self.shape = [], (len(lengths), n)
        for layer in self.layers.values():
            layer.begin([row for row, length in enumerate(lengths) if length == 0])

    @torch.inference_mode()
    def advance(self, counts: Sequence[int]) -> None:
        """Settle the state after the first counts[b] tokens that the forward read of row b."""
        batch, width = self.shape
        if set(counts) == {width}:
            for layer in self.layers.values():
                layer.settled = layer.moved()
        elif any(counts):
            groups = {n: [row for row, count in enumerate(counts) if count == n] for n in set(counts) - {0}}
            states = {n: self._after(rows, n) for n, rows in groups.items()}
            for index, layer in self.layers.items():
                layer.settle([(rows, states[n][index]) for n, rows in groups.items()], batch)
        self.calls = []

    def _after(self, rows: list[int], n: int) -> dict[int, State]:
        """The states of `rows` after the first n tokens."""
        if n < self.shape[1]:
            return self._read_again(rows, n)
        return {index: _rows(layer.moved(), rows) for index, layer in self.layers.items()}

    def _read_again(self, rows: list[int], n: int) -> dict[int, State]:
        """The same from the settled states."""
        parts: dict[int, StateLayer] = {}
        for index, layer in self.layers.items():
            parts[index] = StateLayer()
            parts[index].settled = _rows(layer.settled, rows)
            parts[index].begin()
        assert self.calls, "the forward was told that all of its tokens would be kept"
        cache = Cache(layers=[parts.get(index) for index in range(self.total)])  # type: ignore[misc]
        for call in self.calls:
            call.again(rows, n, cache)
        return {index: part.moved() for index, part in parts.items()}

    def adopt(self, rows: Sequence[int], other: "States", batch: int) -> None:
        """As `SlotCache.adopt`."""
        for index, layer in self.layers.items():
            if other.layers[index].settled:
                layer.settle([(rows, other.layers[index].settled)], batch)

    def select(self, rows: Sequence[int]) -> None:
        """As `SlotCache.select`."""
        for layer in self.layers.values():
            layer.settled = _rows(layer.settled, rows)

    def settled(self) -> list[State]:
        """What `restore` takes back."""
        return [layer.settled for layer in self.layers.values()]

    def restore(self, settled: list[State]) -> None:
        """Go back to what was settled when `settled` told it."""
        for layer, state in zip(self.layers.values(), settled, strict=True):
            layer.settled = state


class Recording:
    """Within it, the calls of `mixers` with `cache` are noted there: those that a rejection would make again."""

    def __init__(self, mixers: Sequence[nn.Module], cache: "SlotCache") -> None:
        self.mixers = mixers if cache.states.shape[1] > 1 else ()
        self.cache, self.handles = cache, list[Any]()

    def __enter__(self) -> None:
        self.handles = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in self.mixers]

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _is_given(self.cache, args, kwargs):
            return  # another thread's
        held = tuple(HERE if value is self.cache else value for value in args)
        named = {name: HERE if value is self.cache else value for name, value in kwargs.items()}
        self.cache.states.calls.append(Call(module, self.cache.states.shape, held, named))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def find_mixers(base: nn.Module, cache: "SlotCache", run: Callable[[], object]) -> list[nn.Module]:
    """The modules in whose calls the states of an empty cache's recurrent layers come into being while `run` runs: for
    each layer the innermost that is given the cache. Raises ValueError when there is none of a layer.
    """
    found: dict[int, nn.Module] = {}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
        if _is_given(cache, args, kwargs):  # an inner module returns before the outer ones
            for index, layer in cache.states.layers.items():
                if layer.moved():
                    found.setdefault(index, module)

    handles = [module.register_forward_hook(after, with_kwargs=True) for module in base.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    missing = sorted(cache.states.layers.keys() - found.keys())
    if missing:
        raise ValueError(f"no module of layer {missing[0]} keeps its state in the cache")
    return [found[index] for index in sorted(found)]


def _is_given(cache: Cache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(value is cache for value in (*args, *kwargs.values()))


def _rows(state: State, rows: Sequence[int]) -> State:
    return {key: tensor[list(rows)] for key, tensor in state.items()}
