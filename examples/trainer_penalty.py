"""An existing Trainer gains penalty, a log of headroom and the conversion at the end by two lines: import and callback.

python examples/trainer_penalty.py OUT
"""

import sys
from importlib.resources import files

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from bf16_to_fp16 import Fp16Callback

if __name__ == "__main__":
    data = files("bf16_to_fp16") / "demo_data"
    model = AutoModelForSeq2SeqLM.from_pretrained(str(data / "t5-gated-bytes")).float()
    tokenizer, mark = AutoTokenizer.from_pretrained(str(data / "t5-gated-bytes")), "<extra_id_124>"
    texts = [line for line in (data / "held_out.txt").read_text().splitlines() if len(line) > 120][:16]
    rows = [tokenizer(t[:40] + mark + t[64:120], text_target=mark + t[40:64]) for t in texts]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "max_steps": 4}
    options |= {"learning_rate": 1e-4, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    # On a GPU, fp16=True instead of use_cpu=True; together they would quietly be fp32.
    arguments = TrainingArguments(use_cpu=True, **options)
    trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), rows, processing_class=tokenizer)
    # T5 does not divide its loss by the number of tokens of the whole step: Trainer has to divide it by the passes.
    trainer.model_accepts_loss_kwargs = False
    callback = Fp16Callback(trainer, sys.argv[1] if len(sys.argv) > 1 else None, headroom_bits=2.0)
    trainer.add_callback(callback)
    print(callback.safe)
    trainer.train()
