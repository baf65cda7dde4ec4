"""The activation-magnitude penalty in a plain PyTorch loop: fp16 autocast, a loss scaler, two lines more.

    python examples/penalty_loop.py

It holds every activation ``headroom_bits`` under fp16's limit while the model is trained on whatever it is trained on.
"""

from __future__ import annotations

from importlib.resources import files

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer

from bf16_to_fp16 import ActivationPenalty, rescale

STEPS, BATCH, GAP, MARK = 8, 4, 24, "<extra_id_124>"


def batches(tokenizer: ByT5Tokenizer, texts: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return batches that ask for the gap in each text."""
    made = []
    for rows in (texts[i : i + BATCH] for i in range(0, STEPS * BATCH, BATCH)):
        pairs = [(r[:40] + MARK + r[40 + GAP : 120], MARK + r[40 : 40 + GAP]) for r in rows]
        texts_in, gaps = (tokenizer(list(side), padding=True, return_tensors="pt") for side in zip(*pairs, strict=True))
        labels = gaps.input_ids.masked_fill(gaps.attention_mask == 0, -100)
        made.append({**texts_in, "labels": labels})
    return made


def main() -> None:
    """Rescale first, then train a few steps."""
    data = files("bf16_to_fp16") / "demo_data"
    folder = str(data / "t5-gated-bytes")
    # fp32 weights under autocast. Eager attention: the penalty has to see the scores.
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rescale(model)  # exact; a penalty on an infinity has no gradient
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # "cuda" on a GPU, and torch.autocast("cuda", ...)
    penalty = ActivationPenalty(model, headroom_bits=2.0).attach()
    model.train()
    for step, batch in enumerate(batches(tokenizer, (data / "held_out.txt").read_text().splitlines())):
        with torch.autocast("cpu", torch.float16):
            task = model(**batch).loss
        loss = task + penalty()  # after the forward, before the backward
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        name, seen = penalty.worst()
        left = penalty.headroom_bits - seen.excess_bits
        print(f"step {step}: loss {task:.3f}, penalty {loss - task:.3f}, headroom {left:.2f} bits at {name}")


if __name__ == "__main__":
    main()
