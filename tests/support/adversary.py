"""An adversary that moves what every norm reads freely: the strongest input that the bounds of a sublayer allow.
Stock modules compute everything else, in fp32 or in real fp16 arithmetic."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from support import tiny
from torch import Tensor

from bf16_to_fp16.families.layout import Layout, walk
from bf16_to_fp16.families.signals import RESIDUAL
from bf16_to_fp16.families.spread import spread_out
from bf16_to_fp16.families.wiring import Attention, Experts, feed_forwards_of
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.stock import run_everywhere, vocabulary_of

DECODER, ENCODER = 7, 9  # positions of the two sides


def liked(state: Mapping[str, Tensor], layout: Layout, topology: Any, gain: Tensor, memory: list[Attention]) -> Tensor:
    """Return directions of a norm's input that the weights behind it answer to most: [n, d], fp32."""

    def rows(path: str) -> Tensor:
        return state[f"{path}.weight"] * gain

    def output_rows(w: Attention) -> Tensor:
        name = f"{w.output}.weight"
        read = layout.tensors[name].axes[1]
        values = rows(w.value).split(w.fused)[-1] if w.fused else rows(w.value)
        if read is None:
            kv_heads = layout.kv_heads(w)
            return state[name] @ spread_out(values, (kv_heads, layout.heads(w) // kv_heads, layout.head_size(w)))
        return state[name] @ spread_out(values, read.spread)

    found = [torch.randn(8, gain.numel()), torch.eye(gain.numel())]
    if isinstance(topology, Experts):
        found += [rows(topology.classifier)] * 4
    for w in [] if topology is None else feed_forwards_of(topology):
        out = state[f"{w.output}.weight"]
        linear = rows(w.linear)
        gate = rows(w.gate) if w.gate else linear
        if w.fused:
            gate, linear = linear.chunk(2)
        found.append(linear)
        tallest = out.norm(dim=1).argsort(descending=True)[:3]
        if w.gate:
            u, v = (torch.nn.functional.normalize(x, dim=1) for x in (gate, linear))
            found += [gate, u + v, u - v]
            size = gate.norm(dim=1) * linear.norm(dim=1)
            for sign in (1, -1):
                for r in tallest:
                    z = u + sign * out[r].sign()[:, None] * v
                    found.append(top(z * (out[r].abs() * size).sqrt()[:, None]))
        else:
            found += [
                linear.clamp(min=0).sum(0, keepdim=True),
                out[tallest] @ linear,
                out[tallest].clamp(min=0) @ linear,
            ]
    if isinstance(topology, Attention):
        paths = [topology.query] if topology.memory else [topology.query, topology.key, topology.value]
        found += [rows(p) for p in paths]
        if not topology.memory:
            found.append(output_rows(topology))
    for cross in memory:
        found += [rows(cross.key), rows(cross.value), output_rows(cross)]
    return torch.cat([f for f in found if f.numel()])


def top(matrix: Tensor) -> Tensor:
    return torch.linalg.svd(matrix, full_matrices=False).Vh[:1]


@contextmanager
def free_norms(model: Any, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Let every norm read ``inputs``, [batch, positions, d], instead of the residual stream."""
    # Cast here: inside, the cast would be an operation of the norm.
    ready = {path: x.to(model.dtype) for path, x in inputs.items()}

    def replace(path: str) -> Any:
        return lambda module, args: (ready[path],)

    with ExitStack() as stack:
        for path in inputs:
            stack.callback(model.get_submodule(path).register_forward_pre_hook(replace(path)).remove)
        yield


def adverse_inputs(model: Any, layout: Layout, batch: int, seed: int, size: float = 300.0) -> dict[str, Tensor]:
    """Return for every norm what it shall read: fp32 [batch, positions, d], directions that the weights like."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    cross = [w for w in layout.topology if isinstance(w, Attention) and w.memory]
    inputs = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        bare = [reader.sublayer for reader in walk(layout) if reader.sublayer is not None and not reader.norm]
        loud = [liked(state, layout, w, torch.ones(layout.signals[RESIDUAL].size), []) for w in bare]
        for reader in walk(layout):
            path, encoder = reader.norm or getattr(reader.sublayer, "post_norm", ""), reader.stack.is_encoder
            last = reader.sublayer is None and encoder
            gain = gain_of(state, layout, path)
            choices = liked(state, layout, reader.sublayer, gain, cross if last else [])
            if reader.sublayer is None and reader.stack.is_last and layout.head is not None:
                choices = torch.cat([choices, *(state[w.weight] * gain for w in layout.head.linears[:1])])
            length = ENCODER if encoder else DECODER

            def drawn(choices: Tensor, *shape: int) -> Tensor:
                chosen = choices[torch.randint(len(choices), shape, generator=generator)].clone()
                chosen *= torch.randint(0, 2, (*shape, 1), generator=generator) * 2 - 1
                return size * torch.nn.functional.normalize(chosen, dim=-1)

            inputs[path] = drawn(choices, batch, length)
            w = reader.sublayer
            if w is not None and w.post_norm:
                inputs[w.post_norm] = drawn(torch.eye(gain.numel()), batch, length)
            if w is not None and w in bare:
                # What is read without a norm is the sum of all that norms have given: all go where one reader likes.
                if w is bare[0]:
                    common = drawn(torch.cat(loud), batch, length)
                inputs[w.post_norm][::2] = size * torch.nn.functional.normalize((common * gain)[::2], dim=-1)
            if isinstance(w, Attention) and w.query_norm:
                queries, keys = (gain_of(state, layout, norm) for norm in (w.query_norm, w.key_norm))
                together = (layout.heads(w), layout.kv_heads(w)) if w.norms_whole else (1, 1)
                sides = zip((w.query_norm, w.key_norm), (layout.heads(w), layout.kv_heads(w)), strict=True)
                for (norm, heads), pairs in zip(sides, loud_pairs(queries, keys, *together), strict=True):
                    read = drawn(pairs, batch, *(() if w.norms_whole else (heads,)), length)
                    inputs[norm] = read.transpose(1, 2) if w.norms_by_position else read
            if isinstance(w, Attention) and w.value_norm:
                choices = state[f"{w.output}.weight"].reshape(-1, layout.head_size(w))
                inputs[w.value_norm] = drawn(choices, batch, length, layout.kv_heads(w))
            if isinstance(w, Attention) and w.block_norm:
                # What sums reach depends on the first norm's output; their own norm's input may be anything as well.
                own = gain_of(state, layout, w.block_norm)
                choices = torch.cat([state[f"{p}.weight"] * own for p in (w.key, w.value)])
                choices = torch.cat([choices, state[f"{w.output}.weight"] @ (state[f"{w.value}.weight"] * own)])
                inputs[w.block_norm] = drawn(choices, batch, ENCODER // layout.positions_per_sum(w))
    return inputs


def gain_of(state: Mapping[str, Tensor], layout: Layout, norm: str) -> Tensor:
    """Return what a norm multiplies by: fp32 [d]."""
    name = f"{norm}.weight"
    return state[name].float() + layout.tensors[name].offset


def loud_pairs(query: Tensor, key: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return inputs of norms of queries and keys of which the loudest pair's channels get all."""
    sides = query.abs().view(heads, 2, -1), key.abs().view(kv_heads, 2, -1).repeat_interleave(heads // kv_heads, 0)
    half = sides[0].shape[2]
    head, pair = divmod(int((sides[0].amax(1) * sides[1].amax(1)).argmax()), half)
    louder = [pair + half * int(gain[head, :, pair].argmax()) for gain in sides]
    places = head * 2 * half + louder[0], head // (heads // kv_heads) * 2 * half + louder[1]
    pairs = zip((torch.eye(len(query)), torch.eye(len(key))), places, strict=True)
    one, other = (torch.cat([every, every[[place]].repeat(len(every), 1)]) for every, place in pairs)
    return one, other


def observe(model: Any, layout: Layout, inputs: Mapping[str, Tensor], *, attention: str = "eager") -> dict[str, float]:
    """Return the largest |x| at every site of a model whose norms read ``inputs``."""
    batch = next(iter(inputs.values())).shape[0]
    generator = torch.Generator().manual_seed(0)
    vocabulary = vocabulary_of(model.config)
    ids = torch.randint(vocabulary, (batch, ENCODER), generator=generator)
    model.set_attn_implementation(attention if model._supports_sdpa else "eager")
    observer = SiteObserver(model)
    with torch.no_grad(), free_norms(model, inputs), observer:
        decoder = {}
        if layout.stock.decodes:
            decoder["decoder_input_ids"] = torch.randint(vocabulary, (batch, DECODER), generator=generator)
        run_everywhere(model, layout, input_ids=ids, **decoder)
    return {site.name: site.amax for site in observer.sites() if "constant" not in site.name}


def scaled(model: Any, seed: int, spread: int) -> Any:
    """Multiply rows of every linear by random powers of two, so that some signals are subnormal and some large."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not getattr(model, "lm_head", None):
            powers = torch.randint(-spread, spread // 4 + 1, (module.out_features, 1), generator=generator)
            module.weight.data.mul_(2.0**powers)
    return model


def cancelling() -> Any:
    """Return a T5 whose first encoder attention sums large values that cancel to nothing but their roundings."""
    model = tiny.build("t5", 3, factor=1.0, num_layers=1, num_decoder_layers=1)
    attention = model.encoder.block[0].layer[0].SelfAttention
    with torch.no_grad():
        values, out = attention.v.weight, attention.o.weight
        values.zero_()
        # Pairs within a head: heads may look at different positions.
        for head in range(model.config.num_heads):
            j = head * model.config.d_kv
            values[j] = torch.randn(values.shape[1]) * 30
            values[j + 1] = values[j]
            values[j + 1, 0] *= 1 + 2.0**-10
            out[:, j] = torch.randn(out.shape[0]).half().float() * 20
            out[:, j + 1] = -out[:, j]
    return model.half()
