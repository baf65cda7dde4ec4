"""Run a stock model many times in one pass over its files, with one block's weights in memory.

A lane is one run of the model, in its own thread. It waits at each place, which is a block, a final norm or a head. The
walk loads the weights of the first place where lanes wait, lets these lanes pass one after another, and drops the
weights. Results equal those of a model loaded whole. A generation reads the weights once per token."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..checkpoint.reader import Checkpoint
from ..progress import Advance
from ..system import one_arena
from .products import Widened, weights_widened_once
from .stock import STOCK_LOCK, set_attention, structure

T = TypeVar("T")

Change = Callable[[str, Tensor], Tensor]
"""A function of a stored weight's name and its values in the run's dtype. It returns the values to use instead."""


class _Ended(BaseException):
    """Raised in a lane, which is the thread of one run, to stop it after another lane failed."""


class _Model:
    """A stock model in one dtype. Each lane has a copy of it that shares the parameters. Only parameters of the block
    that is running have values."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, half: bool) -> None:
        self.module = structure(checkpoint, dtype, half=half)
        self.names = _move_to(self.module, device, checkpoint.tensors)
        self.places = dict(_places("", self.module))
        self.stored = {
            path: [(self.names[each], each) for each in place.parameters() if each in self.names]
            for path, place in self.places.items()
        }
        self.placeholders = {parameter: parameter.data for parameter in self.names}
        self.shared: dict[int, Any] = {id(each): each for each in (*self.module.parameters(), *self.module.buffers())}


def _move_to(model: nn.Module, device: torch.device, stored: Collection[str]) -> dict[nn.Parameter, str]:
    """Move a model to a device, and return the name of each parameter that is stored in a file. Meta tensors become
    placeholders. stored: the names in the files."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if id(old) not in moved:
                    nothing = torch.zeros((), dtype=old.dtype)
                    value = nothing.to(device).expand(old.shape) if old.is_meta else old.data.to(device)
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


def _places(path: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield the path and module of each place where lanes wait, in the model's order. A place is a block, or another
    module with parameters of its own."""
    for name, child in module.named_children():
        below = f"{path}.{name}".removeprefix(".")
        if isinstance(module, nn.ModuleList) or next(child.parameters(recurse=False), None) is not None:
            yield below, child
        else:
            yield from _places(below, child)


@dataclass(eq=False)
class Lane(Generic[T]):
    run: Callable[[Any], T]
    model: Any
    weights: _Model
    change: Change | None
    waits_at: str | None = None  # the place where it waits; None before it has started
    done: bool = False
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    result: T = field(init=False)


def results_of(lanes: Iterable[Lane[T]]) -> list[T]:
    return [lane.result for lane in lanes]


class Walk:
    """Runs a stock model several times in one pass over a checkpoint's files: ``add`` each run, then ``run`` all."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.lanes: list[Lane[Any]] = []
        self._models: dict[Any, _Model] = {}
        self._back: SimpleQueue[None] = SimpleQueue()  # an item each time that a lane comes to a place or to its end
        self._own = threading.local()  # holds each thread's lane
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
        """Add a run of the model as ``stock.load`` would load it, and return its lane, which will hold the result. run:
        is called with the model in its own thread, and must not change weights. half: cast all weights to fp16. change:
        gives other values for stored weights. Raises the errors of ``stock.load``."""
        weights = self._weights(dtype, half)
        model: Any = copy.deepcopy(weights.module, dict(weights.shared))
        set_attention(model, attention)
        for path, module in model.named_modules():
            if path in weights.places:
                # A table of positions may be an embedding too, and asked for a shape instead of ids.
                takes = list(inspect.signature(type(module).forward).parameters)[1:]
                is_lookup = isinstance(module, nn.Embedding) and takes in (["input"], ["input_ids"])
                if is_lookup:
                    self._hook_lookup(module, weights.names[module.weight])
                    continue
                module.register_forward_pre_hook(lambda module, args, path=path: self._pause(path))
        lane = Lane(run, model, weights, change)
        self.lanes.append(lane)
        return lane

    def _weights(self, dtype: torch.dtype, half: bool) -> _Model:
        if (dtype, half) not in self._models:
            self._models[dtype, half] = _Model(self.checkpoint, self.device, dtype, half)
        return self._models[dtype, half]

    def run(self, advance: Advance | None = None) -> None:
        """Run all lanes to their ends, and raise the first error. advance: is called after each block, norm or head."""
        with STOCK_LOCK:
            done, total = 0, max((len(lane.weights.places) for lane in self.lanes), default=0)
            try:
                with one_arena(), weights_widened_once() as widened:
                    for lane in self.lanes:
                        self._resume(lane)
                    while waiting := [lane for lane in self.lanes if not lane.done]:
                        self._run_place(waiting, widened)
                        done = min(done + 1, total - 1)
                        if advance is not None:
                            advance(done, total)
                if advance is not None:
                    advance(total, total)
            finally:
                self._ending = True
                for lane in self.lanes:
                    if lane.thread is not None:
                        lane.go.release()
                        lane.thread.join()
                # Models and their hooks hold the walk, in circles that are not collected at once; results are large.
                self.lanes.clear()
                self._models.clear()

    def _run_place(self, waiting: list[Lane[Any]], widened: Widened) -> None:
        order = {path: i for i, path in enumerate(waiting[0].weights.places)}
        place = min((str(lane.waits_at) for lane in waiting), key=order.__getitem__)
        here = [lane for lane in waiting if lane.waits_at == place]
        read: dict[str, Tensor] = {}
        for weights in dict.fromkeys(lane.weights for lane in here):
            lanes = [lane for lane in here if lane.weights is weights]
            stored = weights.stored[place]
            read |= {name: self.checkpoint.read(name) for name, _ in stored if name not in read}
            plain = {name: read[name].to(self.device, parameter.dtype) for name, parameter in stored}
            if weights is here[-1].weights:
                read.clear()
            for change in dict.fromkeys(lane.change for lane in lanes):
                values = plain if change is None else {name: change(name, value) for name, value in plain.items()}
                for lane in (lane for lane in lanes if lane.change is change):
                    for name, parameter in stored:  # for each lane: Switch's routers overwrite theirs by a cast
                        parameter.data = values[name]
                    self._resume(lane)
                torch.clear_autocast_cache()  # it holds the same parameters under the next change
            widened.clear()
            for _, parameter in stored:
                parameter.data = weights.placeholders[parameter]

    def _resume(self, lane: Lane[Any]) -> None:
        if lane.thread is None:
            thread = threading.Thread(target=self._live, args=(lane,), daemon=True)
            thread.start()
            lane.thread = thread
        else:
            lane.go.release()
        self._back.get()
        if lane.error is not None:
            raise lane.error

    def _live(self, lane: Lane[Any]) -> None:
        self._own.lane = lane
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
        self._back.put(None)

    def _pause(self, place: str) -> None:
        lane: Lane[Any] = self._own.lane
        lane.waits_at = place
        self._back.put(None)
        lane.go.acquire()
        if self._ending:
            raise _Ended

    def _hook_lookup(self, module: nn.Embedding, name: str) -> None:
        def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            shared: Any = module._parameters["weight"]
            # These are no operations of the model: observers need not see them.
            with torch._C._DisableTorchDispatch():
                rows, places = self._rows(name, args[0], shared.dtype)
                padding: Any = module.padding_idx
                if padding is not None and len(rows) <= padding:  # torch wants a row for it
                    rows = torch.cat([rows, rows.new_zeros(padding + 1 - len(rows), rows.shape[1])])
            module._parameters["weight"] = nn.Parameter(rows)
            vars(module)["_shared"] = shared
            return (places,)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            # Without a lookup the weight is still the shared one.
            module._parameters["weight"] = vars(module).pop("_shared", module._parameters["weight"])

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)

    def _rows(self, name: str, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        lane: Lane[Any] = self._own.lane
        wanted, places = ids.unique(return_inverse=True)
        rows = self.checkpoint.read_some_rows(name, wanted.tolist()).to(self.device, dtype)
        return rows if lane.change is None else lane.change(name, rows), places
