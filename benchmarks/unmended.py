"""What a finetune makes of checkpoints that no edit mends: in many heads and gates at once one rare byte passes 65504,
while usual rows are soft, so that a power of two flattens them.

    python benchmarks/unmended.py [--steps 200] [--json FILE]

Each starts from a demo checkpoint. One channel of the stream is taken from all bytes but a rare one, and queries and
gates answer to it: no other byte's row changes by that, whatever the dtype is. The judge is ``tests/support/judge.py``:
stock classes, on held-out text, on code, figures and other languages, and on random ids. Prints a Markdown table: of
bf16, of what ``convert`` writes, and of what a finetune with its defaults returns from that start. Where that one stops
since gradients overflow, another has ``precision: fp32``.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
from finetune import data_of  # noqa: E402
from support import saturated  # noqa: E402
from support.judge import judge  # noqa: E402

from bf16_to_fp16 import UserError, convert, finetune  # noqa: E402

RARE, TEXTS, SEED = 3 + ord("q"), 24, 7
T5, GATE, HEADS = "t5-gated-bytes", "DenseReluDense.wi_0", "SelfAttention.q"
CASES: dict[str, tuple[str, tuple[str, ...], float, int]] = {
    "T5, 12 heads": (
        T5,
        tuple(f"{x}.layer.0.{HEADS}" for x in ("encoder.block.0", "encoder.block.1", "decoder.block.0")),
        1e6,
        1,
    ),
    "T5, 4 heads, 96 gates": (
        T5,
        (
            f"encoder.block.1.layer.0.{HEADS}",
            *(f"{x}.{GATE}" for x in ("encoder.block.0.layer.1", "encoder.block.2.layer.1", "decoder.block.1.layer.2")),
        ),
        2e5,
        10,
    ),
    "Gemma 3, all gates of 2 layers": (
        "gemma3-bytes",
        tuple(f"model.layers.{i}.mlp.gate_proj" for i in range(2)),
        1e6,
        1,
    ),
}
"""By name: the demo, the query projections and gates that saturate, how far, and every how many neurons of a gate."""


@torch.no_grad()
def saturate(model: Any, paths: tuple[str, ...], target: float, step: int) -> None:
    """Make the rare byte's scores and gates pass 65504, in place."""
    table = model.get_input_embeddings().weight
    channel = int(table.square().mean(0).argmin())
    for name, weight in model.named_parameters():  # what writes the channel
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            weight[channel] = -1.0
        elif name.endswith((".o.weight", ".wo.weight")):
            weight[channel] = 0.0
    table[:, channel] = 0.0
    table[RARE, channel] = table.square().mean().sqrt() * 8
    batch = {name: ids.clone() for name, ids in next(saturated.batches(model, 16, 5)).items()}
    for name in {"input_ids", "decoder_input_ids"} & batch.keys():
        batch[name][:, ::29] = RARE
    for path in paths:
        weight, found = model.get_submodule(path).weight, list[torch.Tensor]()
        key = model.get_submodule(f"{path[:-1]}k") if path.endswith(HEADS) else None
        hook = lambda _, inputs, output, found=found: found.append(output.flatten(0, 1))  # noqa: E731
        handles = [m.register_forward_hook(hook) for m in (model.get_submodule(path), key) if m is not None]
        for value in (0.0, 1.0, 0.0):
            weight[:, channel] = value
            saturated.loss_of(model, batch)
        for handle in handles:
            handle.remove()
        reads = (found[len(handles)] - found[0]).abs().amax()  # of the channel, behind the norm
        if key is None:
            some = weight[::step, channel]
            some.copy_(torch.linspace(0.4, 1.0, len(some)) * target / reads)
            continue
        heads = model.config.num_heads
        for rows, keys in zip(
            weight.unflatten(0, (heads, -1)), found[-1].unflatten(1, (heads, -1)).unbind(1), strict=True
        ):
            towards = torch.linalg.svd(keys - keys.mean(0), full_matrices=False).Vh[0]
            rows[:, channel] = towards * target / ((keys @ towards).abs().amax() * reads)


def run(name: str, work: Path, steps: int) -> dict[str, Any]:
    """Return the figures of one case."""
    demo, paths, target, step = CASES[name]
    model = saturated.load(saturated.DEMO / demo)
    saturate(model, paths, target, step)
    saturated.write(model, saturated.DEMO / demo, source := work / "source")
    convert(source, work / "edited")
    recipe = {"source": str(source), "data": data_of("T5" if demo == T5 else ""), "schedule": {"steps": steps}}
    recipe |= {"evaluation": {"every": 40}, "out": str(work / "fp16")}
    try:
        tuned, out = finetune(recipe), "fp16"
    except UserError as error:  # gradients that fp16 holds at no loss scale
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        tuned, out = finetune(recipe | {"precision": "fp32", "out": str(work / "fp32")}), "fp32"
    assert tuned is not None and tuned.report["finetune"] is not None
    found: dict[str, Any] = {"verdict": f"{tuned.report['verdict']}, {tuned.report['proof']}", "precision": out}
    found["finetune"] = {key: tuned.report["finetune"][key] for key in ("kept", "evaluations")}
    for kind, file, between in (("text", "held_out.txt", "\n\n"), ("unlike", "unlike.txt", "\n")):
        texts = [x for x in (saturated.DEMO / file).read_text(encoding="utf-8").split(between) if x][:TEXTS]
        found[kind] = [asdict(judge(source, work / each, texts, SEED)) for each in ("edited", out)]
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """Return the row of one case."""
    columns = []
    for which, dtype in ((0, "bf16"), (0, "fp16"), (1, "fp16")):
        text, unlike = found["text"][which], found["unlike"][which]
        figures = text[f"kl_{dtype}_text"], unlike[f"kl_{dtype}_text"], text[f"kl_{dtype}_random"]
        columns.append(", ".join(f"{x:.1e}" for x in figures))
    return (
        f"| {name} | {' | '.join(columns)} | {found['finetune']['kept']}, {found['precision']} | {found['verdict']} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    options, every = parser.parse_args(), {}
    torch.set_num_threads(1)
    print("| checkpoint | bf16: text, unlike, random | `convert` | finetune | kept step, precision | verdict |")
    print(f"|{'---|' * 6}")
    for name in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            every[name] = run(name, Path(folder), options.steps)
        print(row(name, every[name]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
