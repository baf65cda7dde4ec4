"""LoRA on a converted checkpoint under fp16 AMP, and its adapter taken to the original checkpoint.

    python examples/lora_fp16.py

Needs peft. The T5 demo is converted, an adapter trained on the result for a few steps, the weights that it makes when
it is merged are bounded for any input, and the adapter is written once more for the checkpoint as it was.
"""

import copy
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from bf16_to_fp16 import certify, convert, convert_adapter

DEMO = files("bf16_to_fp16") / "demo_data"


def main(work: Path) -> None:
    """Convert, train an adapter, bound it merged, and compare both checkpoints with their adapters."""
    source, fp16 = DEMO / "t5-gated-bytes", work / "fp16"
    convert(str(source), fp16, target="train", run_model=False)
    tokenizer, mark = AutoTokenizer.from_pretrained(fp16), "<extra_id_124>"
    texts = [line for line in (DEMO / "held_out.txt").read_text().splitlines() if len(line) > 120][:32]
    rows = [tokenizer(t[:40] + mark + t[64:120], text_target=mark + t[40:64]) for t in texts]
    collator, gpu = DataCollatorForSeq2Seq(tokenizer), torch.cuda.is_available()

    base = AutoModelForSeq2SeqLM.from_pretrained(fp16, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"]))
    arguments = TrainingArguments(
        fp16=gpu, use_cpu=not gpu, max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", disable_tqdm=True, report_to="none",
    )  # fmt: skip
    Trainer(model, arguments, collator, rows).train()
    model.save_pretrained(work / "adapter")

    merged = copy.deepcopy(model).cpu().merge_and_unload()
    merged.half().save_pretrained(work / "merged")
    print(f"merged: {certify(work / 'merged')['verdict']}")  # no certificate covers it unmerged
    convert_adapter(work / "adapter", work / "for-original", fp16, back=True)
    original = AutoModelForSeq2SeqLM.from_pretrained(str(source), dtype=torch.float32)
    other = PeftModel.from_pretrained(original, work / "for-original")
    with torch.no_grad():
        one, two = (m.cpu().eval()(**collator(rows[:2])).logits for m in (model, other))
    print(f"largest difference of the logits: {float((one - two).abs().max()):.1e} of {float(one.abs().max()):.0f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
