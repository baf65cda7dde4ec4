"""Batches of padded token ids: how they are made of rows, described in the report, and run by a stock model."""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UserError, first_line, shortened
from ..families.configs import BOTH_WAYS
from ..families.known import of_model_type, spare_padding
from .stock import config_of, decoder_start, is_causal, pad_id, setting, several_rows, takes_decoder_ids

IGNORED_LABEL = -100  # the label that stock losses leave out
LOGIT_BUDGET = 2**27  # most logits of one batch (half a gigabyte in fp32): large vocabularies get fewer rows
GENERATED_TOKENS = 4  # tokens that a generation makes
RANDOM, LONG, REPEATED, PADDED, SHORT = "random ids", "long", "repeated", "padded", "short"
CHOSEN, SWEEP, IMAGE, GENERATE, DATA = "chosen ids", "vocabulary sweep", "image", "generate", "data"
"""The kinds of batches, by which the report counts them."""


@dataclass(frozen=True)
class Batch:
    """One input of a model: int64 token ids and 0/1 masks, [rows, length]."""

    description: str
    input_ids: Tensor
    attention_mask: Tensor
    decoder_input_ids: Tensor | None = None
    decoder_attention_mask: Tensor | None = None
    head: bool = True  # whether to compute logits
    generate: bool = False  # whether to run beam search
    kind: str = "given"  # "given" if the program did not make the batch
    chosen: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ids by the reason for choosing them. Only the first batch of kind ``CHOSEN`` has them, for all such batches."""
    blind: bool = False  # whether some padding attends to no position
    image: Mapping[str, Tensor] = field(default_factory=dict)  # arguments of stock code for an image: pixel_values etc.

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        return {name: getattr(self, name) for name in names} | dict(self.image)

    @property
    def size(self) -> int:
        return sum(x.numel() for x in self.tensors.values() if x is not None)

    def rows(self, chosen: slice | Tensor) -> Batch:
        if self.image:
            assert len(self.input_ids[chosen]) == len(self.input_ids)
            return self
        kept: dict[str, Any] = {name: x[chosen] for name, x in self.tensors.items() if x is not None}
        return replace(self, **kept)

    def labels(self) -> Tensor:
        """Return each position's label: the next id, in ``decoder_input_ids`` if given with a mask, else in
        ``input_ids``. It is -100 at the last position, and where this or the next position is padding."""
        ids, mask = self.decoder_input_ids, self.decoder_attention_mask
        if ids is None or mask is None:
            ids, mask = self.input_ids, self.attention_mask
        labels = torch.full_like(ids, IGNORED_LABEL)
        labels[:, :-1] = ids[:, 1:].masked_fill(mask[:, 1:] * mask[:, :-1] == 0, IGNORED_LABEL)
        return labels


def stack(rows: Sequence[Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Return int64 ids and their 0/1 mask, both [rows, longest]. padding: the id that fills a shorter row's right."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), padding, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return ids, mask


def ended(batch: Batch, end: int) -> Batch:
    """Return the batch with exactly one end token, the id ``end``, in each row, at its last unpadded position."""
    ids = batch.input_ids.clone()
    ids[ids == end] = end - 1 if end else 1
    places = torch.arange(ids.shape[1]) * batch.attention_mask
    ids[torch.arange(len(ids)), places.amax(1)] = end
    return replace(batch, input_ids=ids)


def without_blind_padding(inputs: Sequence[Batch], attention: str) -> list[Batch]:
    """Return the batches that an audit runs under an attention implementation. Eager attention may give NaN for padding
    that attends to no position. Batches with such padding (``blind``) then lose their padded rows."""
    if attention != "eager":
        return list(inputs)
    seen = []
    for batch in inputs:
        masks = [mask for mask in (batch.attention_mask, batch.decoder_attention_mask) if mask is not None]
        full = torch.stack([mask.bool().all(1) for mask in masks]).all(0)
        if not batch.blind or full.any():
            seen.append(batch.rows(full) if batch.blind else batch)
    return seen


def seeded(seed: int) -> torch.Generator:
    if not -(2**63) <= seed < 2**63:
        raise UserError(f"the seed {shortened(seed)} has more than 64 bits; give one from -2^63 to 2^63 - 1")
    return torch.Generator().manual_seed(seed)


def describe_batches(inputs: Sequence[Batch], *, seed: int, data: str | None = None) -> dict[str, Any]:
    """Return the report's entry ``inputs``, from which the same batches can be made again. data: the file or the Hub
    dataset from which texts were read, if any. The entry names a file without its folder."""
    digest = hashlib.sha256()
    for batch in inputs:
        for tensor in batch.tensors.values():
            shape = None if tensor is None else tuple(tensor.shape)
            digest.update(repr(shape).encode())
            if tensor is not None:
                kind = "<f4" if tensor.is_floating_point() else "<i8"
                digest.update(tensor.cpu().contiguous().numpy().astype(kind).tobytes())
    entries: list[dict[str, Any]] = []
    for kind, group in groupby(inputs, key=lambda batch: batch.kind):
        alike = list(group)
        rows, encoder = sum(len(b.input_ids) for b in alike), max(b.input_ids.shape[1] for b in alike)
        decoders = [b.decoder_input_ids.shape[1] for b in alike if b.decoder_input_ids is not None]
        lengths = {"encoder": encoder, "decoder": max(decoders, default=None)}
        entries.append({"kind": kind, "batches": len(alike), "rows": rows, **lengths})
    drawn = sum(entry["rows"] for entry in entries if entry["kind"] == DATA)
    shown = data if data is None or not Path(data).exists() else Path(data).name
    return {
        "seed": seed,
        "data": None if data is None else {"name": shown, "rows": drawn},
        "batches": entries,
        # Token ids by the reason for choosing them; empty if the probe runs the whole vocabulary.
        "chosen": {reason: list(ids) for batch in inputs for reason, ids in batch.chosen.items()},
        "sha256": digest.hexdigest(),  # of all tensors
    }


def run_batch(model: nn.Module, batch: Batch, *, labels: bool = False, **shown: bool) -> Any:
    """Run a stock model on a batch and return its output. It is None for a batch with ``generate``, or without ``head``
    if the model predicts tokens or takes decoder ids. labels: compute a loss too. shown: arguments of stock code that
    ask for more outputs, such as ``output_attentions``. Raises UserError if stock code fails."""
    try:
        return _run(model, batch, labels, shown)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("transformers", "torch"):
            raise
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        raise UserError(
            f"{name}: transformers cannot run it ({first_line(error)}); mend its config.json or generation_config.json"
        ) from error


def _run(model: nn.Module, batch: Batch, labels: bool, shown: Mapping[str, bool]) -> Any:
    device = next(model.parameters()).device
    ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
    stock: Any = model
    if batch.generate:
        # Stock code's cache has as many layers as the encoder, which may be too few for the decoder.
        family = of_model_type(stock.config.model_type)
        layers = setting(stock.config, family.decoder.layers) if family and family.decoder else None
        stock.generate(
            input_ids=ids,
            attention_mask=mask,
            num_beams=2,
            do_sample=False,
            max_new_tokens=GENERATED_TOKENS,
            min_new_tokens=GENERATED_TOKENS,
            use_cache=layers is None or int(layers) <= int(stock.config.num_hidden_layers),
        )
        return None
    images = {name: x.to(device) for name, x in batch.image.items()}
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **images, **shown}
    if batch.decoder_input_ids is None or batch.decoder_attention_mask is None:
        if not is_causal(config_of(stock)):
            with several_rows(stock):
                return stock(**given)
        given |= {"use_cache": False}
        if not batch.head:
            stock.base_model(**given)
            return None
        # Stock code shifts a causal model's labels itself.
        return stock(**given, **({"labels": batch.labels().roll(1, dims=1).to(device)} if labels else {}))
    decoder_ids, decoder_mask = batch.decoder_input_ids.to(device), batch.decoder_attention_mask.to(device)
    told = {} if bool(decoder_mask.all()) else {"attention_mask": decoder_mask}
    if not batch.head:
        states = {"encoder_hidden_states": stock.get_encoder()(**given)[0], "encoder_attention_mask": mask}
        stock.get_decoder()(input_ids=decoder_ids, **states, **told, use_cache=False)
        return None
    decoder = {f"decoder_{name}": x for name, x in ({"input_ids": decoder_ids} | told).items()}
    return stock(**given, **decoder, use_cache=False, **({"labels": batch.labels().to(device)} if labels else {}))


def values_of(output: Any) -> Tensor:
    """Return an output's logits, else its first tensor. Start and end logits are stacked as [rows, positions, 2]."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output["logits"] if "logits" in output else output[0]


def padded(
    config: Any,
    encoder: Sequence[Tensor],
    decoder: Sequence[Tensor],
    description: str = "padded, mixed lengths",
    kind: str = PADDED,
) -> Batch:
    """Return rows of ids as one batch, padded on the right. A decoder row gets a start token and loses its last id; a
    model without a decoder ignores these rows."""
    ids, mask = stack(encoder, pad_id(config))
    if not takes_decoder_ids(config):
        return Batch(description, ids, mask, kind=kind)
    start = torch.tensor([decoder_start(config)])
    shifted = [torch.cat([start, row[:-1]]) for row in decoder]
    return Batch(description, ids, mask, *stack(shifted, pad_id(config)), kind=kind)


def padded_left(config: Any, right: Batch) -> Batch:
    ids = torch.full_like(right.input_ids, pad_id(config))
    mask = right.attention_mask.flip(1)
    ids[mask.bool()] = right.input_ids[right.attention_mask.bool()]
    return replace(right, description=f"{right.description}, padded on the left", input_ids=ids, attention_mask=mask)


def runnable(config: Any, batch: Batch) -> list[Batch]:
    """Return the rows of a batch as batches that stock code can run in fp16. If the model needs a minimum of padding in
    a row, every row of a padded batch gets this minimum in addition. If the model cannot run padding, the result has
    one unpadded batch for each length of rows. For both kinds of model, a batch padded on the left gives []."""
    spare = spare_padding(config.to_dict())
    if spare == 0 or bool(batch.attention_mask.all()):
        return [batch]
    if not bool(batch.attention_mask[:, 0].all()):  # on the left: another batch has the same rows padded on the right
        return []
    if spare < math.inf:
        return [with_spare_padding(config, batch)]
    lengths = batch.attention_mask.sum(1)
    parts = [(n, batch.rows((lengths == n).nonzero()[:, 0])) for n in lengths.unique(sorted=True).tolist()]
    return [
        replace(part, input_ids=part.input_ids[:, :n], attention_mask=part.attention_mask[:, :n]) for n, part in parts
    ]


def with_spare_padding(config: Any, batch: Batch) -> Batch:
    """Return the batch with ``spare_padding`` more positions of padding on the right of every row. If this number is 0
    or infinite, return the batch unchanged. A backward pass in fp16 needs the padding even in an unpadded batch."""
    spare = spare_padding(config.to_dict())
    if not 0 < spare < math.inf:
        return batch
    ids = functional.pad(batch.input_ids, (0, int(spare)), value=pad_id(config))
    return replace(batch, input_ids=ids, attention_mask=functional.pad(batch.attention_mask, (0, int(spare))))


def runnable_as_one(config: Any, batch: Batch) -> Batch:
    """Return the batch with the padding that stock code needs in fp16. If stock code cannot handle padding, the ids of
    each row are repeated up to the batch's length instead. An unpadded batch stays as it is."""
    spare = spare_padding(config.to_dict())
    if spare == 0 or bool(batch.attention_mask.all()):
        return batch
    if spare < math.inf:
        return with_spare_padding(config, batch)
    places = torch.arange(batch.input_ids.shape[1]) % batch.attention_mask.sum(1, keepdim=True)
    ids = batch.input_ids.gather(1, places)
    return replace(batch, input_ids=ids, attention_mask=torch.ones_like(batch.attention_mask))


def is_blind(config: Any, batch: Batch) -> bool:
    """Return whether some padding may attend to no position. This is so for padding on the left under a causal mask,
    and for padding of at least half a sliding window."""
    family = of_model_type(config.model_type)
    if family is not None and not family.blind_padding:
        return False
    sides = [(getattr(config, "encoder", config), batch.attention_mask)]
    if batch.decoder_attention_mask is not None:
        sides.append((getattr(config, "decoder", config), batch.decoder_attention_mask))
    causal = not takes_decoder_ids(config) and setting(config, "use_bidirectional_attention") not in BOTH_WAYS
    return any(_is_blind(own, mask, causal or i > 0) for i, (own, mask) in enumerate(sides))


def _is_blind(config: Any, mask: Tensor, causal: bool) -> bool:
    empty = mask == 0
    before, behind = (int(padding.cumprod(1).sum(1).amax()) for padding in (empty.long(), empty.flip(1).long()))
    window = setting(config, "sliding_window")
    return (causal and before > 0) or 2 * max(before, behind) >= (math.inf if window is None else window)
