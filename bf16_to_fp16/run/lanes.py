"""Many runs of a stock model in one walk over its files, in the memory of one block.

A lane is one ordinary run of a stock model in a thread of its own, with its precision, attention and inputs. Its model
has no weights: at a block, an embedding, a final norm or a head it waits. The walk reads the weights of the first place
where any lane waits, lets those lanes through one after another, drops the weights and goes on. So every mask, bias and
cache is stock code's own, and no number differs from a whole model's. Of an embedding only the rows of the ids are
read. For a lane that comes back to a place (a generation, for each token) the weights are read again.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..checkpoint.reader import Checkpoint
from ..progress import Advance
from ..system import one_arena
from .products import Widened, weights_widened_once
from .stock import set_attention, structure

T = TypeVar("T")

Change = Callable[[str, Tensor], Tensor]
"""Gives the weight that a run is to have in place of the stored one: of its name and values, in the run's dtype."""

_STACK = 1 << 21  # bytes of a lane's stack; the usual 8 MB, for dozens of lanes, would count where memory is limited
_COLLECTIONS = (dict, OrderedDict, set)


class _Ended(BaseException):
    """Raised in a lane that is to end because another one failed or the walk was interrupted."""


class _Model:
    """The parameters that all lanes of one precision share: by places, and empty unless a lane is at one of them."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, half: bool, change: Any):
        self.module = structure(checkpoint, dtype, half=half)
        self.change: Change | None = change
        self.names = _onto(self.module, device, checkpoint.tensors)
        self.places = dict(_places("", self.module))

    def copy(self, attention: str) -> Any:
        """Return a model of its own modules and settings with these parameters."""
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}
        # Every module has a dozen empty collections, for hooks and the like, that deepcopy would take to pieces.
        for module in self.module.modules():
            shared |= {id(x): type(x)() for x in vars(module).values() if type(x) in _COLLECTIONS and not x}
        model = copy.deepcopy(self.module, shared)
        set_attention(model, attention)
        return model

    def stored(self, place: str) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters of a place that files hold, with their names."""
        for parameter in self.module.get_submodule(place).parameters():
            if parameter in self.names:
                yield self.names[parameter], parameter


def _onto(model: nn.Module, device: torch.device, stored: Collection[str]) -> dict[nn.Parameter, str]:
    """Move a model to a device, with placeholders for its meta tensors, and return its parameters' stored names."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if id(old) not in moved:
                    value = _placeholder(old, device) if old.is_meta else old.data.to(device)
                    # Autocast casts a weight once for all lanes only where it could have a gradient.
                    moved[id(old)] = nn.Parameter(value)
                module._parameters[name] = moved[id(old)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in stored:
            names.setdefault(parameter, name)
    return names


def _placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape in the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype).to(device).expand(tensor.shape)


def _places(path: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The modules before which a run waits for weights, in order: blocks, and what has parameters outside them."""
    for name, child in module.named_children():
        below = f"{path}.{name}".removeprefix(".")
        if isinstance(module, nn.ModuleList) or next(child.parameters(recurse=False), None) is not None:
            yield below, child
        else:
            yield from _places(below, child)


@dataclass(eq=False)
class Lane(Generic[T]):
    """One run in a walk; ``result``: what ``run`` returned, there once the walk is over."""

    run: Callable[[Any], T]
    model: Any
    weights: _Model
    waits_at: str | None = None  # the place where it waits; None before it has started
    asks: tuple[nn.Embedding, Tensor] | None = None  # an embedding of which it needs rows, and their ids
    done: bool = False
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    result: T = field(init=False)


def results_of(lanes: Iterable[Lane[T]]) -> list[T]:
    """Return what lanes gave, once their walk is over."""
    return [lane.result for lane in lanes]


class Walk:
    """Runs of the stock model of a checkpoint on a device, added one by one and then run together, place by place."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.lanes: list[Lane[Any]] = []
        self._models: dict[Any, _Model] = {}
        self._read: dict[str, Tensor] = {}
        self._turn = threading.Semaphore(0)
        self._ending = False

    def add(
        self,
        run: Callable[[Any], T],
        dtype: torch.dtype,
        *,
        half: bool = False,
        attention: str = "eager",
        change: Change | None = None,
    ) -> Lane[T]:
        """Add a run of the model as ``run.stock.load`` gives it with ``dtype``, ``half`` and ``attention``. run: is
        called with the model, without gradients, in a thread of its own; it must not change weights. change: applied to
        each weight, ``Lane``s with the same one share their weights. Raises ``UserError`` as ``load`` does."""
        weights = self._weights(dtype, half, change)
        lane = Lane(run, weights.copy(attention), weights)
        for path, module in lane.model.named_modules():
            if path in weights.places:
                if _is_lookup(module):
                    self._hook_lookup(lane, module)
                else:
                    module.register_forward_pre_hook(lambda module, args, path=path: self._pause(lane, path))
        self.lanes.append(lane)
        return lane

    def _weights(self, dtype: torch.dtype, half: bool, change: Change | None = None) -> _Model:
        key = (dtype, half, change)
        if key not in self._models:
            self._models[key] = _Model(self.checkpoint, self.device, *key)
        return self._models[key]

    def alike(self, one: tuple[torch.dtype, bool], other: tuple[torch.dtype, bool]) -> bool:
        """Return whether all weights have the same dtypes under two values of (``dtype``, ``half``)."""
        first, second = ([p.dtype for p in self._weights(*key).module.parameters()] for key in (one, other))
        return first == second

    def run(self, advance: Advance | None = None) -> None:
        """Run all lanes to their ends; raises what the first lane that fails raises. advance: called after every
        place."""
        steps = [0, max((len(lane.weights.places) for lane in self.lanes), default=0)]

        def count() -> None:
            steps[0] = min(steps[0] + 1, steps[1] - 1)
            if advance is not None:
                advance(*steps)

        try:
            with one_arena(), weights_widened_once() as widened:
                for lane in self.lanes:
                    self._resume(lane)
                while waiting := [lane for lane in self.lanes if not lane.done]:
                    self._run_place(waiting, widened)
                    count()
            if advance is not None:
                advance(steps[1], steps[1])
        finally:
            self._end()

    def _run_place(self, waiting: list[Lane[Any]], widened: Widened) -> None:
        """Let the lanes through that wait at the first place where any does."""
        order = {path: i for i, path in enumerate(waiting[0].weights.places)}
        place = min((str(lane.waits_at) for lane in waiting), key=order.__getitem__)
        here = [lane for lane in waiting if lane.waits_at == place]
        models = list(dict.fromkeys(lane.weights for lane in here))
        for weights in models:
            self._load(weights, place, widened)
            if weights is models[-1]:
                self._read.clear()
            for lane in here:
                if lane.weights is weights:
                    self._resume(lane)
            widened.clear()
            self._drop(weights, place)

    def _load(self, weights: _Model, place: str, widened: Widened) -> None:
        for name, parameter in weights.stored(place):
            if name not in self._read:
                self._read[name] = self.checkpoint.read(name)
            tensor = self._read[name].to(self.device, parameter.dtype)
            parameter.data = tensor if weights.change is None else weights.change(name, tensor)
            if parameter.dtype == torch.float32:
                widened.offer(parameter.data)

    def _drop(self, weights: _Model, place: str) -> None:
        for _, parameter in weights.stored(place):
            parameter.data = _placeholder(parameter, self.device)
        torch.clear_autocast_cache()

    def _resume(self, lane: Lane[Any]) -> None:
        """Let a lane run to the next place where it waits, or to its end; raise what it raises."""
        while True:
            if lane.thread is None:
                before = threading.stack_size(_STACK)
                lane.thread = threading.Thread(target=self._live, args=(lane,), daemon=True)
                lane.thread.start()
                threading.stack_size(before)
            else:
                lane.go.release()
            self._turn.acquire()
            if lane.error is not None:
                raise lane.error
            if lane.asks is None:
                return
            self._look_up(lane, *lane.asks)

    def _live(self, lane: Lane[Any]) -> None:
        # Leaving autocast's outermost level would empty the cache that all lanes share, and each would cast anew.
        torch.autocast_increment_nesting()
        try:
            with torch.no_grad():
                lane.result = lane.run(lane.model)
        except _Ended:
            pass
        except BaseException as error:
            lane.error = error
        lane.done = True
        lane.model = None
        self._turn.release()

    def _pause(self, lane: Lane[Any], place: str | None) -> None:
        """Called in a lane at a place: give the turn back and wait for the next."""
        lane.waits_at = place
        self._turn.release()
        lane.go.acquire()
        if self._ending:
            raise _Ended

    def _end(self) -> None:
        """End the lanes that are not done, each in its turn."""
        self._ending = True
        for lane in self.lanes:
            if lane.thread is not None:
                lane.go.release()
                lane.thread.join()
        self._models.clear()

    def _hook_lookup(self, lane: Lane[Any], module: nn.Embedding) -> None:
        def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            lane.asks = (module, args[0])  # type: ignore[assignment]
            self._pause(lane, lane.waits_at)
            (_, places), lane.asks = lane.asks, None  # type: ignore[misc]
            return (places,)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            # Kept any longer, it would hold what was read at another place of a tied weight.
            module.weight.data = vars(module).pop("_whole")

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _look_up(self, lane: Lane[Any], module: nn.Embedding, ids: Tensor) -> None:
        """Give an embedding the rows of some ids, and put in the ids' place where the rows are."""
        weight: Any = module.weight
        wanted, places = ids.unique(return_inverse=True)
        name = lane.weights.names[weight]
        rows = self.checkpoint.read_some_rows(name, wanted.tolist()).to(self.device, weight.dtype)
        if lane.weights.change is not None:
            rows = lane.weights.change(name, rows)
        if module.padding_idx is not None and len(rows) <= module.padding_idx:  # it must be a row, and is one of none
            rows = torch.cat([rows, rows.new_zeros(module.padding_idx + 1 - len(rows), rows.shape[1])])
        module._whole = weight.data
        weight.data = rows
        lane.asks = (module, places)


def _is_lookup(module: nn.Module) -> bool:
    # A table of positions may be an embedding too, and asked for a shape instead of ids.
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    return isinstance(module, nn.Embedding) and takes in (["input"], ["input_ids"])
