"""``Fp16Callback`` in a real Trainer: penalty in its loss, headroom in its logs, and a safe folder at the end."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.learner import TEXT, tiny_model

from bf16_to_fp16 import ActivationPenalty, AdamW, Fp16Callback, UserError, make_fp16_safe
from bf16_to_fp16.measuring.stock import load

pytestmark = pytest.mark.usefixtures("first_batch")
ROWS = 12
Make = Callable[..., Any]


def model() -> Any:
    """One that overflows fp16 as it is, without dropout."""
    made = tiny_model(dropout=0.0)
    made.encoder.block[0].layer[1].DenseReluDense.wo.weight.data.mul_(1e5)
    made.encoder.block[0].layer[1].DenseReluDense.wi_1.weight.data.mul_(1e3)
    return made


def rows() -> list[dict[str, list[int]]]:
    texts = [list(f"{index} {TEXT}".encode()) for index in range(ROWS)]
    return [{"input_ids": [b + 3 for b in text[:20]], "labels": [b + 3 for b in text[20:28]]} for text in texts]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def trainer(made: Any, optimizer: Any = None, **settings: Any) -> transformers.Trainer:
        given: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        given |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1}
        given |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        given |= {"optim": "adamw_torch"}
        arguments = transformers.TrainingArguments(str(tmp_path / "trainer"), **(given | settings))
        return transformers.Trainer(made, arguments, train_dataset=rows(), optimizers=(optimizer, None))

    return trainer


def in_a_loop(made: Any, order: list[list[dict[str, Any]]], *, divided: bool) -> dict[str, torch.Tensor]:
    """The same training without a Trainer: two passes a step, a loss that it divides by them, or does not."""
    made.set_attn_implementation("eager")
    make_fp16_safe(made)
    penalty = ActivationPenalty(made, headroom_bits=14.0, accumulation=2).attach()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, weight_decay=0.0)
    made.train()
    for step in order:
        for batch in step:
            loss = made(**batch).loss
            ((loss + penalty()) / 2 if divided else loss + penalty() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert max(seen.weight for seen in penalty.observations().values()) > 0
    penalty.detach()
    return {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}


@pytest.mark.parametrize("by_items", [True, False])
def test_the_penalty_is_part_of_the_loss_however_the_trainer_divides_it(make: Make, by_items: bool) -> None:
    trainer = make(model())
    trainer.model_accepts_loss_kwargs = by_items
    order: list[list[dict[str, Any]]] = [[]]
    step = trainer.training_step

    def noted(made: Any, inputs: Any, items: Any = None) -> Any:
        order[-1].append({name: tensor.clone() for name, tensor in inputs.items()})
        if len(order[-1]) == 2:
            order.append([])
        return step(made, inputs, items)

    trainer.training_step = noted
    reported: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):
        """Is told of a log before the callback is, as report_to's services are."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            reported.append(dict(logs))

    trainer.add_callback(Reporter())
    callback = Fp16Callback(trainer, headroom_bits=14.0)
    trainer.add_callback(callback)
    trainer.train()
    assert sum({"headroom_bits", "penalty"} < set(row) for row in reported) == 3
    assert callback.safe is not None and callback.safe.changed and callback.result is None
    expected = in_a_loop(model(), order[:3], divided=not by_items)
    got = trainer.model.state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 3 and all(set(row) > {"headroom_bits", "penalty"} for row in logs)
    assert [row["penalty"] > 0 for row in logs] == [False, True, True]
    name, seen = callback.penalty.worst()
    assert 2.0 ** -logs[-1]["headroom_bits"] * 65504 == pytest.approx(seen.amax) and name


def test_a_run_that_is_resumed_takes_the_steps_that_it_would_have_taken(make: Make, tmp_path: Path) -> None:
    ends = []
    for resumes in (False, True):
        saving = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": resumes}
        trainer = make(model(), max_steps=4, **saving)
        callback = Fp16Callback(trainer, headroom_bits=14.0)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2") if resumes else None)
        weights = {name: seen.weight for name, seen in callback.penalty.observations().items()}
        ends.append((trainer.model.state_dict(), weights))
    (one, weights), (other, resumed) = ends
    assert weights == resumed and max(weights.values()) > 0
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_a_checkpoint_without_the_callback_may_be_at_another_scale_and_is_refused(make: Make, tmp_path: Path) -> None:
    make(model(), save_strategy="steps", save_steps=3).train()
    trainer = make(model(), max_steps=6)
    trainer.add_callback(Fp16Callback(trainer))
    with pytest.raises(UserError, match="the checkpoint of step 3 was saved without this callback"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-3"))


def test_what_was_trained_is_converted_at_the_originals_scale(make: Make, tmp_path: Path) -> None:
    source = model()
    optimizer = AdamW(source.parameters(), lr=1e-3, moments="bfloat16")
    trainer = make(source, optimizer, gradient_accumulation_steps=1)
    out = tmp_path / "out"
    callback = Fp16Callback(trainer, out)
    trainer.add_callback(callback)
    trainer.train()
    assert optimizer.state[source.shared.weight]["exp_avg"].dtype == torch.bfloat16
    assert callback.result is not None and callback.result.safe and (out / "fp16_report.json").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    # What went into the conversion overflows as the original does, which the trained model no longer does.
    assert max(signal["before"] for signal in callback.result.report["signals"]) > 65504
    ids, targets = torch.arange(5, 25)[None], torch.arange(4)[None]
    with torch.no_grad():
        trained = trainer.model.eval()(input_ids=ids, decoder_input_ids=targets).logits
        written = load(out, torch.float32)(input_ids=ids, decoder_input_ids=targets).logits
        before = model().eval()(input_ids=ids, decoder_input_ids=targets).logits
    assert float((written - trained).abs().max()) < 0.05 * float((trained - before).abs().max())
    with pytest.raises(UserError, match="exists; choose another output path or give --force"):
        Fp16Callback(make(model()), out)


def test_a_trainer_that_divides_its_model_is_refused_before_anything_changes(make: Make) -> None:
    for changed in ({"is_fsdp_enabled": True}, {"is_deepspeed_enabled": True}, {"args": SimpleNamespace(n_gpu=2)}):
        trainer = make(model())
        trainer.__dict__.update(changed)
        with pytest.raises(UserError, match="launch one process for each card"):
            Fp16Callback(trainer)
        assert all(torch.equal(a, b) for a, b in zip(model().parameters(), trainer.model.parameters(), strict=True))
