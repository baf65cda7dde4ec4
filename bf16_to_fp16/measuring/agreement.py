"""Check that stock code (transformers) builds the model that the layout describes, for which bounds are computed.

The layout is made from some keys of the config. Any other config attribute that stock code reads is accepted only if no
bound depends on it, or if its value is the one that stock code makes from the layout's keys alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..checkpoint.contents import check_sentence_encoder
from ..checkpoint.formats import shown
from ..checkpoint.reader import Checkpoint
from ..checkpoint.recorded import CONVERTED_KEY
from ..errors import UserError, first_line
from ..families.configs import looked_up, with_value
from ..families.known import stock_class
from ..families.layout import Layout
from ..families.resolve import eps_attribute, resolve
from ..families.types import Family
from ..families.wiring import Attention, Experts, StackEnds
from .stock import check_complete, load_config, run_everywhere, without_values

FREE_KEYS = frozenset(
    f"""
    {CONVERTED_KEY} _name_or_path _output_attentions architectures bos_token_id decoder_start_token_id dtype
    eos_token_id gradient_checkpointing init_std initializer_factor initializer_range name_or_path output_attentions
    output_cross_attentions output_hidden_states pad_token_id return_dict tie_word_embeddings transformers_version
    use_cache
    """.split()
)
"""Config attributes of any family on which no bound depends. The loader's report tells whether weights are tied."""

LABELS = frozenset({"id2label", "label2id", "num_labels", "problem_type"})
"""Config attributes that name a classifier's outputs. ``check_agreement`` compares their number with the weights."""

MOST_POSITIONS = 2.0**31  # the most by which a rotary frequency is multiplied
_ABSENT = object()


def agreed_layout(checkpoint: Checkpoint) -> Layout:
    """Return the layout of a checkpoint, after a check that stock code builds the same model. Raises UserError if it
    builds another, or if sentence-transformers' ``modules.json`` lists modules that are not supported."""
    layout = resolve(checkpoint)
    check_sentence_encoder(checkpoint.folder)
    check_agreement(checkpoint, layout)
    return layout


def check_agreement(checkpoint: Checkpoint, layout: Layout) -> None:
    import transformers

    where, config = f"{checkpoint.folder}/config.json", load_config(checkpoint.folder)
    for key in layout.family.tie_keys if layout.tied else ():
        if not (tie := looked_up(layout.config, key, True)):
            raise UserError(
                f"{where}: {key!r} is {shown(tie)}, and there is no separate {layout.family.head}: transformers 4"
                " would fill it with random numbers; use the whole original checkpoint and its config.json"
            )
    refused, asked = refusals(layout, type(config), attributes(config), where), set[str]()
    with refusing(checkpoint, refused, asked):
        if getattr(transformers, stock_class(checkpoint.config)).can_generate():
            try:
                transformers.GenerationConfig.from_model_config(config)
            except Exception:
                asked.update(refused)  # it copies the whole config: any refused attribute may be the cause
                raise
        model, info = without_values(checkpoint, noting(deepcopy(config), asked), torch.float32, any_shape=True)
    check_complete(checkpoint.folder, checkpoint.config, info["missing_keys"])
    mend = "use the config.json that belongs to these weights"
    for name in sorted(set(info["unexpected_keys"]) - set(layout.dropped)):
        raise UserError(f"{checkpoint.source}: transformers drops tensor {name}; {mend}")
    for name, *shapes in sorted(info["mismatched_keys"]):
        stored, wanted = (list(shape) for shape in shapes)
        raise UserError(
            f"{checkpoint.source}: tensor {name} has shape {stored}, and transformers wants {wanted}; {mend}"
        )
    check_modules(layout, model, where)
    with refusing(checkpoint, refused, asked):
        scales = run_short(model, layout)
    if scales != (layout.head_scale != 1.0):
        raise UserError(
            f"{where}: the bounds assume that the decoder's output is {'not ' if scales else ''}multiplied by d^-1/2"
            f" before the head, but transformers {'does it' if scales else 'does not'}; take the original config.json"
        )


@contextmanager
def refusing(checkpoint: Checkpoint, refused: Mapping[str, str], asked: set[str]) -> Iterator[None]:
    """Raise UserError if stock code fails in the ``with`` block, or has read a config attribute that is refused.
    refused: error messages by attribute. asked: the attributes that stock code has read, as ``noting`` records them."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    for name in sorted(asked & refused.keys()):
        raise UserError(refused[name]) from failed
    if failed is not None:
        raise UserError(
            f"{checkpoint.folder}: cannot be loaded or run ({first_line(failed)}); use the config.json that belongs to"
            " these weights"
        ) from failed


def noting(config: Any, asked: set[str], within: str = "") -> Any:
    """Make every read of a config's attribute add the attribute's name to ``asked``, and return the config. Nested
    configs are included. within: the prefix of their attributes' names, such as ``text_config.``"""
    kind: Any = type(config)

    def attribute(config: Any, name: str) -> Any:
        name = kind.attribute_map.get(name, name)
        asked.add(within + name)
        return kind.__getattribute__(config, name)

    for name, inner in configs_inside(config).items():
        noting(inner, asked, f"{within}{name}.")
    config.__class__ = type(kind.__name__, (kind,), {"__getattribute__": attribute})
    return config


def configs_inside(config: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def attributes(config: Any) -> dict[str, Any]:
    inside = configs_inside(config)
    values = {name: value for name, value in vars(config).items() if name not in inside}
    for name, inner in inside.items():
        # The class fixes model_type, even where the file leaves it out.
        own = attributes(inner) | {"model_type": type(inner).model_type}
        values |= {f"{name}.{key}": value for key, value in own.items()}
    return values


def check_modules(layout: Layout, model: nn.Module, where: str) -> None:
    from transformers.activations import ACT2FN

    names = layout.family.attributes

    def same(path: str, attribute: str, expected: object, *, optional: bool = False) -> None:
        value = getattr(model.get_submodule(path), attribute, _ABSENT)
        if value != expected and not (optional and value is _ABSENT):
            raise UserError(
                f"{where}: transformers sets {path}.{attribute} to {shown(value)}, but the bounds are for"
                f" {expected!r}; take the config of the original checkpoint"
            )

    for part in layout.topology:
        if isinstance(part, Attention):
            heads, own = layout.heads(part), part.attributes or names
            if own.heads:
                same(part.at, own.heads, heads)
            same(part.at, own.head_size, layout.head_size(part))
            if own.groups:
                same(part.at, own.groups, heads // layout.kv_heads(part))
            same(part.at, "scaling", layout.score_scale(part), optional=not part.scaled or part.divides)
            if part.rotary is not None and part.turns:
                module = model.get_submodule(part.rotary.at)
                for attribute in rotary_scales(module):
                    if not 0 <= getattr(module, attribute) <= part.rotary.factor:
                        same(part.rotary.at, attribute, part.rotary.factor)
        elif isinstance(part, StackEnds) and names.embedding_scale:
            same(part.scaling_module, names.embedding_scale, layout.embedding_scale(part))
    for feed_forward in layout.feed_forwards:
        activation, expected = model.get_submodule(feed_forward.act), ACT2FN[feed_forward.activation]
        if type(activation) is not type(expected) or own_attributes(activation) != own_attributes(expected):
            raise UserError(
                f"{where}: in transformers {feed_forward.act} is {type(activation).__name__}, but the bounds are for"
                f" {feed_forward.activation!r}; take the config of the original checkpoint"
            )
    first = tuple(part.first_norm for part in layout.topology if isinstance(part, StackEnds) and part.first_norm)
    for path in (*layout.norms, *first):
        same(path, eps_attribute(model.get_submodule(path)), layout.eps_of(path))
    check_rotary(layout, model, where)
    check_projector(layout, model, where)


def check_projector(layout: Layout, model: Any, where: str) -> None:
    if (part := layout.family.projector) is None:
        return
    norm = model.get_submodule(part.norm)
    eps, token = getattr(norm, eps_attribute(norm)), attrgetter(part.image.token)(model.config)
    if not 0 < torch.tensor(eps, dtype=torch.float32) < math.inf:
        raise UserError(
            f"{where}: in transformers the eps of {part.norm} is {shown(eps)}, not a small positive number such as"
            " 1e-06; take it from the original checkpoint"
        )
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise UserError(
            f"{where}: {part.image.token!r} is {shown(token)}, not an id; take it from the original checkpoint"
        )


def own_attributes(module: nn.Module) -> dict[str, object]:
    """Return a module's public attributes except ``training``. A ``partial`` becomes a tuple, which can be compared."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {n: (f.func, f.args, f.keywords) if isinstance(f, partial) else f for n, f in own.items()}


def rotary_scales(module: nn.Module) -> list[str]:
    return [name for name in vars(module) if name.endswith("attention_scaling")]


def check_rotary(layout: Layout, model: Any, where: str) -> None:
    """Raise UserError where stock code cannot compute rotary angles at the first or the last possible position."""
    attentions = [part for part in layout.topology if isinstance(part, Attention) and part.turns]
    for path in sorted({part.rotary.at for part in attentions if part.rotary is not None}):
        # Built again off the meta device: no file holds the frequencies.
        module = model.get_submodule(path)
        check_dynamic(module.config.rope_parameters, where)
        again = type(module)(module.config)
        kinds = [name.removesuffix("attention_scaling").removesuffix("_") for name in rotary_scales(again)]
        for position in (0, int(MOST_POSITIONS) - 1):
            # Some kinds make other frequencies for long inputs: "longrope" one other set, "dynamic" as below.
            for kind in kinds:
                try:
                    again(torch.zeros(1), torch.tensor([[position]]), **({"layer_type": kind} if kind else {}))
                except Exception as error:
                    raise UserError(
                        f"{where}: transformers cannot compute rotary position {position} ({first_line(error)}); take"
                        " the keys that begin with 'rope' from the original checkpoint"
                    ) from error
            for name, frequencies in again.named_buffers():
                if not bool((frequencies.float() * MOST_POSITIONS).isfinite().all()):
                    raise UserError(
                        f"{where}: rotary positions become inf or NaN in transformers ({path}.{name}); take the keys"
                        " that begin with 'rope' from the original config.json"
                    )


def check_dynamic(parameters: Any, where: str) -> None:
    """Raise UserError for "dynamic" rotary positions whose factor is no finite number or is under 1. transformers only
    warns of a factor under 1. A negative factor can make the frequencies NaN for long inputs."""
    if not isinstance(parameters, Mapping):
        return
    # For n positions, the config's maximum m ≤ n, base θ, factor f and head size d > 2, frequency i is the power −2i/d
    # of θ·b^(d/(d − 2)), where b = 1 + f·(n/m − 1). If f ≥ 0, b is at least 1 and does not fall with n, so the first
    # and the last position have the extreme frequencies. If f < 0, b is negative for large n, and its power can be NaN.
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, Mapping))):
        factor = each.get("factor")
        if each.get("rope_type") == "dynamic" and not (isinstance(factor, (int, float)) and 1 <= factor < math.inf):
            raise UserError(
                f"{where}: the factor of 'dynamic' rotary positions is {factor!r}, and must be a finite number of at"
                " least 1; take it from the original checkpoint"
            )


class _TrueValues(TorchDispatchMode):
    """Dispatch mode in which every tensor on the meta device has the value True. Stock code may branch on a value, as
    BigBird-Pegasus does on its mask."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def run_short(model: Any, layout: Layout) -> bool:
    """Return whether a model on the meta device scales its decoder's output before the head. Its first layers run on
    two tokens, and errors of stock code are raised."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    seen: dict[str, Tensor] = {}
    with ExitStack() as stack, torch.no_grad(), _TrueValues():
        for part in layout.stacks():
            # Routing needs values, which meta tensors lack: a first layer with experts is left out.
            sparse = next((i for i, w in enumerate(part.sublayers) if not isinstance(w, Attention)), 0)
            number = int(not isinstance(part.sublayers[sparse], Experts)) if part.sublayers else 1
            module = model.get_submodule(part.ends.at)
            # One layer of each kind, since each kind has its own rotary positions.
            kinds = list(getattr(module.config, "layer_types", None) or ())
            number = max(number, *(kinds.index(kind) + 1 for kind in kinds)) if kinds else number
            name, layers = next((n, m) for n, m in module.named_children() if isinstance(m, nn.ModuleList))
            stack.callback(setattr, module, name, layers)
            setattr(module, name, layers[:number])
        if layout.head is not None:
            last = model.get_submodule(layout.stacks()[-1].ends.at)
            reader = model.get_submodule(layout.head.linears[0].at)
            stack.callback(last.register_forward_hook(lambda _, __, out: seen.update(out=out[0])).remove)
            stack.callback(reader.register_forward_pre_hook(lambda _, inputs: seen.update(head=inputs[0])).remove)
        decoder = {"decoder_input_ids": ids} if layout.stock.takes_decoder_ids else {}
        caches = (layout.stock.decodes or layout.stock.is_language_model) and not layout.family.encoder_refuses_cache
        run_everywhere(model, layout, input_ids=ids, **decoder, **({"use_cache": True} if caches else {}))
    # The head may read some positions only, which are a view of the output.
    return layout.head is not None and not any(x is seen["out"] for x in (seen["head"], seen["head"]._base))


def refusals(layout: Layout, kind: Any, written: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return an error message for each config attribute that is refused. The layout was made from only some keys of the
    config. Stock code makes an expected config from these keys alone. An attribute is refused if its value differs
    from the expected value, unless no bound depends on it. kind: the config's class. written: the config's attributes.
    where: the file that messages name. Raises UserError if stock code cannot make the expected config."""
    family = layout.family
    free = {*FREE_KEYS, *LABELS, *family.free_keys, *family.dropout.values()}
    beginnings = tuple(key.removesuffix("*") for key in free if key.endswith("*"))
    if not layout.stock.decodes:
        free.add("is_encoder_decoder")  # true or false in published encoders
    nested: dict[str, object] = {}
    for name, value in layout_values(family, layout.config).items():
        nested = with_value(nested, name, value)
    try:
        expected = attributes(kind(**deepcopy(nested)))
    except Exception as error:  # which each class raises of its own kind
        raise UserError(
            f"{where}: transformers cannot make a config from the keys that the bounds use ({first_line(error)}); take"
            " the file from the original checkpoint"
        ) from error
    attention = "_attn_implementation_internal"
    refused: dict[str, str] = {}
    for name in {*written, *expected} - {attention}:
        if name in free or name.rpartition(".")[2] in free or name.startswith(beginnings):
            continue
        value, wanted = written.get(name, _ABSENT), expected.get(name, _ABSENT)
        if value is not wanted and (type(value) is not type(wanted) or value != wanted):
            names = (*(key for key, own in kind.attribute_map.items() if own == name), name)
            spelt = next((key for key in names if looked_up(layout.config, key) == value), name)
            says, mend = (f"is {shown(value)}", "remove") if value is not _ABSENT else ("is missing", "set")
            follows = f"be {wanted!r}" if wanted is not _ABSENT else "not be there"
            refused[name] = (
                f"{where}: {spelt!r} {says}, but by the other keys it should {follows}, and transformers"
                f" reads this key; {mend} it, or take the file from the original checkpoint"
            )
    if written.get(attention) not in (None, "eager", "sdpa"):  # the bounds hold for these two
        refused[attention] = (
            f"{where}: asks for the attention implementation {shown(written[attention])}, about which nothing is known;"
            " remove the key"
        )
    return refused


def layout_values(family: Family, config: Mapping[str, object]) -> dict[str, object]:
    """Return the config values, by key, from which a layout of ``family`` is made."""
    keys = {*family.config_keys, *family.aliases, *family.aliases.values(), *family.eps_keys, *family.tie_keys}
    values = {key: looked_up(config, key, _ABSENT) for key in (keys | {"model_type", family.output_scale_key}) - LABELS}
    return {key: value for key, value in values.items() if value is not _ABSENT}
