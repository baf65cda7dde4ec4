"""The activation-magnitude penalty on a model of a family that the package cannot convert: EXAONE 4.

    python examples/penalty_any_model.py

A small EXAONE 4 with random weights, whose residual stream overflows fp16, is trained until every activation fits. Its
stream is what `bf16-to-fp16 audit` names first.
"""

import torch
from transformers import Exaone4Config, Exaone4ForCausalLM

from bf16_to_fp16 import ActivationPenalty

STEPS, HEADROOM_BITS = 100, 1.0


def overflowing() -> Exaone4ForCausalLM:
    """Return a model whose last feed-forward adds about 320,000 to the stream: its post-norm's gain is that large."""
    torch.manual_seed(0)
    config = Exaone4Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=1,
        attn_implementation="eager",
    )
    model = Exaone4ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[-1].post_feedforward_layernorm.weight.fill_(200_000.0)
    return model


def main() -> None:
    """Train on a repeated pattern and print the tightest site."""
    model = overflowing().train()
    large = model.model.layers[-1].post_feedforward_layernorm.weight
    others = [p for p in model.parameters() if p is not large]
    # A gain of 200,000 needs steps of its size.
    optimizer = torch.optim.AdamW([{"params": [large], "lr": 1e4}, {"params": others, "lr": 1e-4}], weight_decay=0.0)
    ids = torch.arange(4 * 32).reshape(4, 32) * 7 % 256
    with ActivationPenalty(model, headroom_bits=HEADROOM_BITS) as penalty:
        for step in range(STEPS):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss + penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            name, seen = penalty.worst()
            if step % 10 == 0 or step == STEPS - 1:
                left = HEADROOM_BITS - seen.excess_bits
                print(f"step {step}: loss {loss.item():.3f}, headroom {left:.2f} bits at {name}")


if __name__ == "__main__":
    main()
