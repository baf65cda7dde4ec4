"""Models whose scores span a given range, so that what stock masks add decides who is seen."""

import math
from typing import Any

import torch
from support import tiny
from torch import Tensor

from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.wiring import Attention

LOUD = 0  # the token that every other one's query likes, and its own does not; all others dislike each other

SMALL = {"num_layers": 1, "num_decoder_layers": 1}

NARROW = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 12, "decoder_attention_heads": 12}
NARROW |= {"scale_embedding": False}
"""Heads so narrow that scaled scores may span more than fp16 holds."""


def spanning(kind: str, size: float) -> Any:
    """Return an fp32 model in whose self-attentions products of a query and a key reach about ±``size``."""
    torch.manual_seed(0)
    model = tiny.KINDS[kind](**NARROW if kind == "pegasus" else SMALL).eval()
    layout, state = resolve(ModelTensors(model)), model.state_dict()
    width = model.config.d_model
    way = torch.randn(width)
    way = (way - way.mean()) / (way - way.mean()).norm()
    with torch.no_grad():
        table = state[layout.family.embedding]
        # Beside positions of about 1 in each channel the token decides.
        table.copy_(100 * (0.02 * torch.randn_like(table) - way))
        table[LOUD] = 100 * way
        for w in layout.topology:
            if isinstance(w, Attention) and not w.memory:
                head = state[f"{w.query}.weight"].shape[0] // layout.heads(w)
                for path, sign in ((w.query, 1), (w.key, -1)):
                    state[f"{path}.weight"].zero_()
                    state[f"{path}.weight"][::head] = sign * math.sqrt(size / width) * way
    return model


def seen_alone_and_masked(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of outputs that differ only in what is masked."""
    text = torch.tensor([[5, 6, 7, 8]])
    longer = torch.cat([text, torch.full((1, 2), LOUD)], 1)
    mask = (torch.arange(6) < 4).long()[None]
    encoder = model.get_encoder()

    def first_logits(last: int) -> Tensor:
        return model(input_ids=text, decoder_input_ids=torch.tensor([[5, 6, last]])).logits[:, :2].float()

    with torch.no_grad():
        alone = encoder(input_ids=text).last_hidden_state.float()
        beside = encoder(input_ids=longer, attention_mask=mask).last_hidden_state[:, :4].float()
        decoded = [(first_logits(7), first_logits(LOUD))] if hasattr(model, "lm_head") else []
    return [(alone, beside), *decoded]
