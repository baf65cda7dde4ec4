"""Build the declaration (``Part``) of a sublayer, an embedding, a final norm or a head. It follows from how the weights
are stored (``Style``) and how the modules are connected."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from .signals import (
    LOGITS,
    RESIDUAL,
    Axis,
    Kind,
    ObservationPoint,
    Signal,
    Spread,
    Tensor,
    before,
    columns_of,
    divided_by,
    input_of,
    multiplied_by,
    output_of,
)
from .types import Part
from .wiring import Attention, Experts, FeedForward, Head, HeadLinear, Projector, StackEnds, Sublayer


@dataclass(frozen=True)
class Style:
    """How a family's weights are stored. ``model`` and all later fields are names of axis sizes in ``Family.sizes``."""

    biased: Collection[str] = ()  # last path components of linears with a bias
    shifts: bool = False  # whether norms have a bias
    offset: float = 0.0  # the number that stock code adds to stored gains; if it is not 0, rescaling rounds these gains
    model: str = "model"
    inner: str = "inner"
    kv_inner: str = "kv_inner"
    head: str = "head"
    ff: str = "ff"
    memory: str = ""  # the encoder's width, "" if it is ``model``

    def norm(self, path: str, axis: Axis | None, size: str = "") -> tuple[Tensor, ...]:
        names = ("weight", "bias") if self.shifts else ("weight",)
        return tuple(Tensor(f"{path}.{name}", (size or self.model,), (axis,), offset=self.offset) for name in names)

    def linear(self, path: str, rows: str, columns: str, *axes: Axis | None) -> tuple[Tensor, ...]:
        written, read = axes
        if written is not None and written.signal == RESIDUAL and read == divided_by(RESIDUAL):
            # The stream's factor passes through, and the weight stays as it is.
            written, read = (written.others[0] if written.others else None), None
        weight = Tensor(f"{path}.weight", (rows, columns), (written, read))
        if path.rpartition(".")[2] not in self.biased:
            return (weight,)
        return weight, Tensor(f"{path}.bias", (rows,), axes[:1])

    def reads(self, norm: str) -> Axis | None:
        if not norm:
            return divided_by(RESIDUAL)
        return None if self.offset else divided_by(norm)

    def normalised(self, norm: str) -> tuple[tuple[Signal, ...], tuple[Tensor, ...]]:
        if not norm:
            return (), ()
        signal = Signal(norm, Kind.FIXED if self.offset else Kind.NORM, self.model, (output_of(norm),))
        return (signal,), self.norm(norm, None if self.offset else multiplied_by(norm))

    def before(self, norm: str, linear: str, size: str = "") -> tuple[Signal, ...]:
        if not norm:
            return ()
        seen = (output_of(linear), input_of(norm))
        return (Signal(before(norm), Kind.BEFORE_NORM, size or self.model, (), added_at=seen),)

    def behind(self, wiring: Sublayer) -> tuple[Tensor, ...]:
        return self.norm(wiring.post_norm, multiplied_by(RESIDUAL)) if wiring.post_norm else ()


PLAIN = Style()


def to_norm(norm: str) -> Axis:
    """Return a linear's output axis, which is multiplied by the residual stream's factor. If a norm reads this output,
    the axis is also multiplied by the factor of the signal ``before(norm)``. norm: the norm's path, "" for none."""
    stream = multiplied_by(RESIDUAL)
    return stream.with_others(multiplied_by(before(norm))) if norm else stream


def spreads(wiring: Attention, share: Spread) -> tuple[Spread, Spread]:
    """Return two shapes, each a ``Spread``: for the channels of queries, and for the channels of keys. In such a shape,
    channels that differ only in the second or fourth index share an exponent. share: as in ``attention``."""
    # Query heads that read one key head share exponents. Two channels that a rotation mixes share an exponent.
    if wiring.rotary is None:
        return share, ()
    kv_heads, heads, size = share
    if wiring.rotary.turned == size // 2:
        return (kv_heads, heads, 2, 2, size // 4), (kv_heads, 1, 2, 2, size // 4)
    if wiring.rotary.turned:  # one for each head: pairs of other shares are no grid of channels
        return (kv_heads, heads * size, 1), (kv_heads, size, 1)
    if wiring.rotary.interleaved:
        return (kv_heads, heads, size // 2, 2), (kv_heads, 1, size // 2, 2)
    return (kv_heads, 2 * heads, size // 2), (kv_heads, 2, size // 2)


def fused_rows(fused: tuple[int, ...], number: int, spread: Spread = ()) -> Spread:
    """Return the ``Spread`` of a fused matrix's rows. The matrix joins several linears, and the signal rescales the
    rows of only one of them. fused: how many rows each linear has; () for a matrix of one linear. number: the index of
    the rescaled linear. spread: how the rows of the rescaled linear share the signal's channels."""
    if not fused:
        return spread
    before, after = sum(fused[:number]), sum(fused[number + 1 :])
    inside = spread or (fused[number],)
    return (*((-before,) if before else ()), *inside, *((-after,) if after else ()))


def attention(wiring: Attention, style: Style = PLAIN, share: Spread = ()) -> Part:
    """Return the declaration of an attention: signals, tensors and wiring. share: (key heads, query heads for each,
    size of a head); () if nothing is rotated and each query head has its own key head."""
    value, scores = f"{wiring.at}.value", f"{wiring.at}.scores"
    normed, gains = style.normalised(wiring.norm)
    own, rows = style.reads(wiring.norm), fused_rows(wiring.fused, 2)
    others, columns = (None, style.memory or style.model) if wiring.memory else (own, style.model)
    taken = () if wiring.fused or wiring.query_norm else (Signal(columns_of(scores), Kind.COLUMNS, style.model, ()),)
    key_norm = "" if wiring.value_norm and wiring.value == wiring.key else wiring.key_norm  # that reads its input alone
    queries, keys, inner, query_key, priced = for_scores(wiring, style, share)
    values = multiplied_by(value, rows)
    read: Axis | None = divided_by(value, share)
    carried: tuple[Signal, ...] = (
        Signal(value, Kind.VALUE, style.kv_inner, (output_of(wiring.value, 1, rows), input_of(wiring.output, share))),
    )
    stream = [input_of(wiring.entrance)]
    if wiring.query_norm:
        stream += map(output_of, (wiring.query, wiring.key))
        stream += map(input_of, (wiring.query_norm, wiring.key_norm))
    if wiring.value_norm:
        # The norm takes out every factor. What two norms read has the stream's alone.
        alone = wiring.value_norm if key_norm else ""
        keys = to_norm(key_norm)
        values, read, carried = to_norm(alone), None, style.before(alone, wiring.value, style.kv_inner)
        stream += [output_of(wiring.value), input_of(wiring.value_norm)]
    if wiring.fused:
        joint = queries.with_others(*queries.others, keys, values)
        size = f"{style.inner}+{style.kv_inner}+{style.kv_inner}"
        linears = *style.linear(wiring.query, size, columns, joint, own), *inner
    else:
        linears = (
            *style.linear(wiring.query, style.inner, style.model, queries, with_columns(own, scores) if taken else own),
            *style.linear(wiring.key, style.kv_inner, columns, keys, others),
            *inner,
            *style.linear(wiring.value, style.kv_inner, columns, values, others),
        )
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, style.model, (*stream, *joining(wiring))),
            *normed,
            query_key,
            *style.before(wiring.query_norm, wiring.query, style.inner),
            *style.before(key_norm, wiring.key, style.kv_inner),
            *style.before(wiring.post_norm, wiring.output),
            priced,
            *taken,
            *carried,
        ),
        tensors=(
            *gains,
            *linears,
            *style.linear(wiring.output, style.model, style.inner, to_norm(wiring.post_norm), read),
            *style.behind(wiring),
        ),
        topology=wiring,
    )


def for_scores(wiring: Attention, style: Style, share: Spread) -> tuple[Axis, Axis, tuple[Tensor, ...], Signal, Signal]:
    """Return what an attention declares for queries and keys: the output axis of the query weight, the output axis of
    the key weight, tensors of any norms, and the signals ``query_key`` and ``scores``. share: as in ``attention``."""
    query_key, scores = f"{wiring.at}.query_key", f"{wiring.at}.scores"
    if wiring.query_norm:
        # A rotation mixes the channels of a pair, so both gains of a pair carry the same factor.
        query_size, key_size = (style.inner, style.kv_inner) if wiring.norms_whole else (style.head, style.head)
        read, of_keys = spreads(wiring, share if wiring.norms_whole else (1, 1, share[2]))
        moved = multiplied_by(scores).with_others(multiplied_by(query_key, read))
        gains = (
            *style.norm(wiring.query_norm, moved, query_size),
            *style.norm(wiring.key_norm, divided_by(query_key, of_keys), key_size),
        )
        seen = output_of(wiring.query_norm, 1, read), output_of(wiring.key_norm, -1, of_keys)
        both = Signal(query_key, Kind.QUERY_KEY, key_size, seen, of_keys)
        priced = Signal(scores, Kind.ASYMPTOTIC, query_size, (), added_at=(output_of(wiring.query_norm),))
        # All norms share one eps, so the inputs of these norms get the residual stream's factor.
        return to_norm(wiring.query_norm), to_norm(wiring.key_norm), gains, both, priced
    read, of_keys = spreads(wiring, share)
    first, *rows = (fused_rows(wiring.fused, *of) for of in ((0,), (0, read), (1, of_keys)))
    seen = output_of(wiring.query, 1, rows[0]), output_of(wiring.key, -1, rows[1])
    both = Signal(query_key, Kind.QUERY_KEY, style.kv_inner, seen, of_keys)
    priced = Signal(scores, Kind.ASYMPTOTIC, style.inner, (), added_at=(output_of(wiring.query, 1, first),))
    queries = multiplied_by(query_key, rows[0]).with_others(multiplied_by(scores, first))
    return queries, divided_by(query_key, rows[1]), (), both, priced


def joining(wiring: Attention | FeedForward) -> tuple[ObservationPoint, ...]:
    """Return the observation points of a sublayer's output: at its output linear and at any norm behind it."""
    behind = (input_of(wiring.post_norm), output_of(wiring.post_norm)) if wiring.post_norm else ()
    return output_of(wiring.output), *behind


def with_columns(own: Axis | None, signal: str) -> Axis:
    columns = multiplied_by(columns_of(signal))
    return columns if own is None else own.with_others(columns)


def feed_forward(wiring: FeedForward, style: Style = PLAIN) -> Part:
    """Return the declaration of a feed-forward. Powers of two pass ReLU and the linear branch of a gate exactly, but
    GELU and SiLU only for large inputs."""
    neuron, gate = f"{wiring.at}.neuron", f"{wiring.at}.gate"
    normed, gains = style.normalised(wiring.norm)
    moves = bool(wiring.gate) or wiring.activation == "relu"
    gates, neurons = (fused_rows(wiring.fused, number) for number in (0, 1))
    out, back = multiplied_by(neuron, neurons), divided_by(neuron)
    opened = multiplied_by(gate, gates)
    if wiring.gate:
        back = back.with_others(divided_by(gate))
    if wiring.fused:
        out = out.with_others(opened)
    seen = output_of(wiring.linear, 1, neurons), input_of(wiring.output)
    pre_activations = Signal(gate, Kind.ASYMPTOTIC, style.ff, (output_of(wiring.gate, 1, gates),), added_at=seen[1:])
    own = style.reads(wiring.norm)
    taken: tuple[Signal, ...] = ()
    gated: tuple[Tensor, ...] = ()
    if wiring.gate and not wiring.fused:
        gated = style.linear(wiring.gate, style.ff, style.model, opened, with_columns(own, gate))
        taken = (Signal(columns_of(gate), Kind.COLUMNS, style.model, ()),)
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, style.model, (input_of(wiring.entrance), *joining(wiring))),
            *normed,
            Signal(neuron, Kind.NEURON if moves else Kind.ASYMPTOTIC, style.ff, seen),
            *((pre_activations,) if wiring.gate else ()),
            *taken,
            *style.before(wiring.post_norm, wiring.output),
        ),
        tensors=(
            *gains,
            *style.linear(wiring.linear, f"{style.ff}+{style.ff}" if wiring.fused else style.ff, style.model, out, own),
            *style.linear(wiring.output, style.model, style.ff, to_norm(wiring.post_norm), back),
            *gated,
            *style.behind(wiring),
        ),
        topology=wiring,
    )


def experts(wiring: Experts, declared: Sequence[Part], *others: Tensor, biased: bool = False) -> Part:
    """Return the declaration of a router and its experts. declared: the declaration of each expert, including a shared
    one. others: the router's further tensors. biased: whether its linear has a bias."""
    routing = f"{wiring.classifier}.routing"
    chosen = multiplied_by(routing)
    router = [Tensor(f"{wiring.classifier}.weight", ("experts", "model"), (chosen, divided_by(wiring.norm)))]
    if biased:
        router.append(Tensor(f"{wiring.classifier}.bias", ("experts",), (chosen,)))
    signals = {(signal.name, signal.seen): signal for part in declared for signal in part.signals}
    return Part(
        signals=(*signals.values(), Signal(routing, Kind.ASYMPTOTIC, "experts", (output_of(wiring.classifier),))),
        tensors=(*dict.fromkeys(t for part in declared for t in part.tensors), *router, *others),
        topology=wiring,
    )


def projector(wiring: Projector, last: str, *tensors: Tensor, size: str = "vision") -> Part:
    """Return a projector's declaration. last: its last module. size: its norm's width, a key of ``Family.sizes``."""
    stream = Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(last),))
    return Part((stream, Signal(wiring.norm, Kind.FIXED, size, (output_of(wiring.norm),))), tensors, wiring)


def table(name: str, model: str = "model") -> Tensor:
    return Tensor(name, ("vocab", model), (None, multiplied_by(RESIDUAL)))


def ends(wiring: StackEnds, *tensors: Tensor, model: str = "model") -> Part:
    positions = [output_of(wiring.positions.removesuffix(".weight"))] if wiring.positions else []
    seen = (output_of(wiring.embedding), *positions, input_of(wiring.norm))
    return Part((Signal(RESIDUAL, Kind.RESIDUAL, model, seen),), tensors, wiring)


def states(norm: str, style: Style = PLAIN) -> Part:
    """Return the declaration of a final norm whose output is read by users or by another stack."""
    return Part((Signal(f"{norm}.output", Kind.FIXED, style.model, (output_of(norm),)),), style.norm(norm, None))


def head(weight: str, at: str = "lm_head", cap: str = "") -> Head:
    return Head("lm_head", (HeadLinear(at, weight),), cap=cap)


def logits(of: Head) -> Signal:
    return Signal(LOGITS, Kind.LOGITS, "vocab", (output_of(of.linears[0].at),))


def tied_head(norm: str, of: Head, style: Style = PLAIN, *others: Tensor) -> Part:
    """Return the declaration of a final norm and a tied head. The gains are divided by the embedding's factor."""
    seen = Signal(RESIDUAL, Kind.RESIDUAL, style.model, (output_of(norm, -1),))
    return Part(
        (seen, replace(logits(of), added_at=(output_of(norm),))),
        (*style.norm(norm, divided_by(RESIDUAL).with_others(multiplied_by(LOGITS))), *others),
        of,
    )


def untied_head(norm: str, of: Head, style: Style = PLAIN, *others: Tensor, sizes: Sequence[str] = ("vocab",)) -> Part:
    """Return the declaration of a final norm and a separate head. sizes: the output size of each of the head's linears,
    as keys of ``Family.sizes``."""
    normed, gains = style.normalised(norm)
    if style.offset:
        normed, gains = states(norm, style).signals, states(norm, style).tensors
    signals, tensors = [*normed], [*gains]
    reads, width = style.reads(norm), style.model
    for linear, size in zip(of.linears, sizes, strict=True):
        name, kind = (f"{linear.at}.tanh", Kind.ASYMPTOTIC) if linear.tanh else (LOGITS, Kind.LOGITS)
        tensors.append(Tensor(linear.weight, (size, width), (multiplied_by(name), reads)))
        if linear.bias:
            tensors.append(Tensor(linear.bias, (size,), (multiplied_by(name),)))
        signals.append(Signal(name, kind, size, (output_of(linear.at),)))
        reads, width = None, size
    return Part(tuple(signals), (*tensors, *others), of)


def head_linear(at: str, tanh: str = "", *, biased: bool = True) -> HeadLinear:
    return HeadLinear(at, f"{at}.weight", f"{at}.bias" if biased else "", tanh)
