"""The activation-magnitude penalty in a transformers Trainer: a subclass that adds it, a callback that shows headroom.

python examples/trainer_penalty.py
"""

from importlib.resources import files
from typing import Any

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

from bf16_to_fp16 import ActivationPenalty, rescale


class PenaltyTrainer(Trainer):
    """A Trainer whose loss in training has the penalty in it."""

    def __init__(self, *given: Any, headroom_bits: float = 1.0, **options: Any) -> None:
        super().__init__(*given, **options)
        # T5 does not divide its loss by the number of tokens of the whole step: Trainer has to divide it by the passes.
        self.model_accepts_loss_kwargs = False
        passes = self.args.gradient_accumulation_steps
        self.penalty = ActivationPenalty(self.model, headroom_bits=headroom_bits, accumulation=passes).attach()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **rest)
        if model.training:
            loss = loss + self.penalty()
        return (loss, outputs) if return_outputs else loss


class ShowHeadroom(TrainerCallback):
    """Shows the tightest site's headroom after every step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        name, seen = trainer.penalty.worst()
        left = trainer.penalty.headroom_bits - seen.excess_bits
        print(f"step {state.global_step}: headroom {left:.2f} bits at {name}")


if __name__ == "__main__":
    data = files("bf16_to_fp16") / "demo_data"
    model = AutoModelForSeq2SeqLM.from_pretrained(str(data / "t5-gated-bytes"), attn_implementation="eager").float()
    rescale(model)  # exact, and first: a penalty on an infinity has no gradient
    tokenizer, mark = AutoTokenizer.from_pretrained(str(data / "t5-gated-bytes")), "<extra_id_124>"
    texts = [line for line in (data / "held_out.txt").read_text().splitlines() if len(line) > 120][:16]
    rows = [tokenizer(t[:40] + mark + t[64:120], text_target=mark + t[40:64]) for t in texts]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "max_steps": 4}
    options |= {"learning_rate": 1e-4, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    # On a GPU, fp16=True instead of use_cpu=True; together they would quietly be fp32.
    trainer = PenaltyTrainer(
        model,
        Arguments(use_cpu=True, **options),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=rows,
        callbacks=[ShowHeadroom()],
        headroom_bits=2.0,
    )
    trainer.train()
