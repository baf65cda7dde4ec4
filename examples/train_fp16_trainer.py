"""Finetuning under fp16 AMP with a stock Trainer, on a card without bf16 (T4, V100): one line before, one after.

    python examples/train_fp16_trainer.py

The T5 demo overflows fp16 as published T5s do. Here it is made safe in memory, trained for a few steps and taken back.
With a GPU that is under fp16 autocast and a loss scale; without one in fp32, which trains the same way.
"""

from importlib.resources import files

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from bf16_to_fp16 import make_fp16_safe

DEMO = files("bf16_to_fp16") / "demo_data"


def main() -> None:
    """Train, and show what was done and that undoing it kept what was learnt."""
    # In fp32: AMP keeps the weights so, and casts them for each product.
    model = AutoModelForSeq2SeqLM.from_pretrained(str(DEMO / "t5-gated-bytes"), dtype=torch.float32)
    tokenizer, mark = AutoTokenizer.from_pretrained(str(DEMO / "t5-gated-bytes")), "<extra_id_124>"
    texts = [line for line in (DEMO / "held_out.txt").read_text().splitlines() if len(line) > 120][:32]
    rows = [tokenizer(t[:40] + mark + t[64:120], text_target=mark + t[40:64]) for t in texts]

    safe = make_fp16_safe(model)
    print(safe)
    # With follow, rate and clipping mean what they mean for the original; the Trainer's own would clip in other units.
    optimizer = safe.follow(torch.optim.AdamW(model.parameters(), lr=1e-4), model, max_grad_norm=1.0)
    gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        fp16=gpu,
        use_cpu=not gpu,
        max_steps=8,
        per_device_train_batch_size=4,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    collator = DataCollatorForSeq2Seq(tokenizer)
    Trainer(model, arguments, collator, rows, optimizers=(optimizer, None)).train()

    model.eval()
    probe = {name: values.to(model.device) for name, values in collator(rows[:2]).items()}
    with torch.no_grad():
        trained = model(**probe).logits
        safe.undo(model)  # now save_pretrained writes weights and config at the original's scale
        print(f"undone, the same logits: {torch.equal(trained, model(**probe).logits)}")


if __name__ == "__main__":
    main()
