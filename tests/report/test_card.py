"""The model card: front matter that invents nothing, a bad verdict in the first line, usage that runs."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from support import fakes, tiny
from support.pages import certified

from bf16_to_fp16.checkpoint.reader import Checkpoint
from bf16_to_fp16.report import card as cards
from bf16_to_fp16.report import page
from bf16_to_fp16.report.markdown import prose, span
from bf16_to_fp16.report.schema import Report, read

SOURCE_CARD = """---
license: other
license_name: our-own
license_link: https://example.org/licence
language: [en, no, de]
tags: [summarization, tf, onnx, fp16]
pipeline_tag: summarization
base_model: someone/else
datasets: [c4]
---
# Theirs
"""


def write_card(path: Path, source: Checkpoint, report: dict[str, Any]) -> None:
    place = {} if report.get("finetune") else {"revision": source.revision}
    place |= {} if source.revision is None else {"path": source.source}
    origin = report["source"] | place | {"card": cards.front_matter(source.folder)}
    cards.write_card(path, read(Report, report | {"source": origin}), source.config)


def checkpoint(
    folder: Path, *, readme: str | bytes | None = None, revision: str | None = None, **config: Any
) -> Checkpoint:
    if readme is not None:
        (folder / "README.md").write_bytes(readme.encode() if isinstance(readme, str) else readme)
    config = {"architectures": ["T5ForConditionalGeneration"]} | config
    return Checkpoint(folder, "someone/summariser-large@v2", revision, config, {}, (), None)


def card(folder: Path, report: dict[str, Any], **options: Any) -> ModelCard:
    source = Path(tempfile.mkdtemp(dir=folder))
    write_card(folder / "README.md", checkpoint(source, **options), report)
    return ModelCard.load(folder / "README.md")


def test_front_matter_is_inherited_from_the_card_of_the_source_or_of_its_pipeline(tmp_path: Path) -> None:
    data = card(tmp_path, fakes.conversion(), readme=SOURCE_CARD, revision="0" * 40).data.to_dict()
    wanted: dict[str, Any] = {"license_name": "our-own", "license_link": "https://example.org/licence"}
    wanted |= {"license": "other", "base_model": "someone/summariser-large", "library_name": "transformers"}
    wanted |= {"pipeline_tag": "summarization", "tags": ["summarization", "fp16", "bf16-to-fp16"]}
    assert data == wanted | {"language": ["en", "de"]}
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "text_encoder_2").mkdir()
    write_card(tmp_path / "out.md", checkpoint(tmp_path / "text_encoder_2"), fakes.conversion())
    assert ModelCard.load(tmp_path / "out.md").data.license == "mit"


@pytest.mark.parametrize(
    "readme",
    [
        *(None, "# no front matter", "---\nlicense: [\n---\n", "---\n- a list\n---\n"),
        *("---\nlicense: 3\ntags: {a: b}\n---\n", b"---\nlicense: \xff\xfe\n---\n"),
    ],
)
def test_what_the_source_does_not_say_is_not_invented(tmp_path: Path, readme: str | bytes | None) -> None:
    written = card(tmp_path, fakes.conversion(), readme=readme)
    data = written.data.to_dict()
    assert data == {"library_name": "transformers", "tags": ["fp16", "bf16-to-fp16"]}
    assert "names a licence, so none is given here" in written.text
    assert "names languages, so none are given here either" in written.text


def test_an_unsafe_verdict_is_the_first_line(tmp_path: Path) -> None:
    written = card(tmp_path, fakes.conversion(safe=False))
    first = written.text.lstrip().splitlines()[0]
    assert first.startswith("> **Unsafe in fp16.** Overflows in half, first at ")
    assert "DenseReluDense.wo; up to 1,200 values are inf or NaN" in first.replace("`", "")
    assert first.endswith(f" Next: finetune it: `{fakes.COMMAND}`")
    assert written.text.count(fakes.COMMAND) == 1
    # What was observed to be unsafe is no reason to speak of headroom.
    assert "which is what headroom is for" not in written.text and written.text.count("Unsafe in fp16") == 1
    assert ".half()\n" not in written.text and "`.half()` is not safe" in written.text
    assert "so that its activations fit fp16" not in written.text and "which was not enough for fp16" in written.text


def test_a_plan_is_told_in_short_and_what_is_inexact_not_called_exact(tmp_path: Path) -> None:
    report = fakes.conversion()
    assert "leaves every bit" in card(tmp_path, report).text
    report["plan"] |= {"gain_correction": {"a.weight": 1.01}}
    assert "leaves every bit" not in card(tmp_path, report).text
    moved = report["plan"]["exponents"]
    report["plan"]["exponents"] = {k: [e and -3 for e in v] if isinstance(v, list) else v for k, v in moved.items()}
    text = card(tmp_path, report).text
    assert "36 of 1,536 moved, by exponents −3\n" in text and "−3 to" not in text
    report["plan"]["exponents"]["a.value"] = [i % 2 for i in range(100_000)]
    assert len(card(tmp_path, report).text) < 50_000


def test_a_safe_verdict_comes_with_its_figures(tmp_path: Path) -> None:
    text = card(tmp_path, fakes.conversion()).text
    assert text.lstrip().startswith("# `summariser-large` in fp16")
    assert "**Safe in fp16: nothing overflowed" in text and "Unsafe" not in text
    shown = ("3.9 × (1.9 bits) |", "| 99.9999% |", "times 2⁻³", "36 of 1,536 moved")
    assert all(figure in text for figure in shown)
    assert "bf16-to-fp16 convert someone/summariser-large out\nbf16-to-fp16 undo DIR OUT" in text
    assert "Licence as" not in text and "bf16-to-fp16 verify DIR" in text
    for family, keeps_wo in (("t5", True), ("umt5", True), ("pegasus", False)):
        text = card(tmp_path, fakes.conversion() | {"family": family}).text
        assert ("_keep_in_fp32_modules" in text) is keeps_wo
    assert "so that its activations fit fp16" in text and "which was not enough for fp16" not in text


def test_hostile_names_cannot_leave_their_place(tmp_path: Path) -> None:
    report = fakes.conversion(safe=False)
    report["source"] |= {"path": "a`b</code><script>x</script>\n# Heading", "carried_over": []}
    report["command"] = "bf16-to-fp16 convert '```\n# Heading'"
    key = "one | two <b>bold</b> [link](https://example.org)\n---\nlicense: mit"
    report["source"]["config_changes"] = {key: {"before": 1, "after": 2}}
    report["unsafe"] = []
    written = card(tmp_path, report)
    assert written.data.get("license") is None
    assert not re.search(r"^(# Heading|license:)", written.text, re.MULTILINE)
    assert written.text.count("```") == 4
    outside = re.sub(r"(`+).*?\1", "", written.text)
    assert not re.search(r"(?<!\\)<(script|b)>", outside)
    assert "one \\| two \\<b\\>bold" in written.text
    unproven = certified(top=900_000.0)
    unproven["uncertified"][0] |= {"name": "place|0", "remedy": "remedy|0"}
    text = card(tmp_path, unproven).text
    assert "| `place\\|0` | " in text and "What helps: remedy\\|0." in text
    assert prose("max |x|_y\n*z*") == "max \\|x\\|\\_y \\*z\\*"
    assert span("plain") == "`plain`" and span("a``b") == "``` a``b ```"


@pytest.mark.parametrize(
    ("kind", "family"),
    [("gated", "t5"), ("t5-encoder", "t5"), ("pegasus", "pegasus"), ("embeddinggemma", "gemma3"), ("gemma2", "gemma2")],
)
def test_the_usage_runs(tmp_path: Path, kind: str, family: str) -> None:
    model = tiny.build(kind)
    folder = tiny.save(model, tmp_path / "out", torch.float16)
    report = fakes.conversion() | {"family": family}
    report["source"]["carried_over"] = []
    source = checkpoint(tmp_path, architectures=[type(model).__name__])
    write_card(folder / "README.md", source, report)
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    scope: dict[str, Any] = {}
    exec(code[1].replace("path/to/this/folder", str(folder)), scope)
    assert {p.dtype for p in scope["model"].parameters()} == {torch.float16}
    states = kind in ("t5-encoder", "embeddinggemma")
    assert scope["last_hidden_state" if states else "tokens"].shape[0] == 1
    # What goes on with its input is not shown a text that has ended.
    assert ("AutoModelForCausalLM" in code[1]) == ("[[5, 6, 7]]" in code[1]) == (kind == "gemma2")


def test_the_usage_brings_the_tokenizer_where_there_is_one(tmp_path: Path) -> None:
    report = fakes.conversion()
    text = card(tmp_path, report).text
    assert "AutoTokenizer.from_pretrained(folder)" in text and '"input_ids"' not in text
    for name, has in (("tokenizer.model", True), ("sentencepiece.bpe.model", True), ("merges.txt", False)):
        report["source"]["carried_over"] = [name]
        assert ("AutoTokenizer" in card(tmp_path, report).text) is has
    compile(text.split("```python\n")[1].split("```")[0], "usage", "exec")


def test_a_finetunes_card_says_recipe_original_and_how_far_it_went(tmp_path: Path) -> None:
    report = fakes.conversion() | {"finetune": {"recipe": {"source": "someone/summariser-large", "steps": 5}}}
    written = card(tmp_path, report)
    assert written.data.get("base_model") == "someone/summariser-large"
    recipe = written.text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe) == report["finetune"]["recipe"]
    plain = card(tmp_path, fakes.conversion()).text
    kept = {"measure": "kl", "kl_bf16": 0.01, "kl_fp16": 2.5, "top1_bf16": 0.99, "top1_fp16": 0.321}
    evaluations = [{"held_out_loss": 2.0}, {"step": 50}, {"held_out_loss": None}, {"held_out_loss": 2.125}]
    run = {"recipe": {"steps": 140}, "steps": 140, "fidelity": kept, "evaluations": evaluations}
    text = card(tmp_path, fakes.conversion() | {"finetune": run}).text
    assert "finetuned so that its activations fit fp16" in text and "by a finetune of 140 steps" in text
    assert "what they compute: KL to the original is 2.5 nats per token on the audit's inputs." in text
    assert "rounding to fp16 is the only other change to the finetuned weights." in text
    assert "rounding to fp16 is the only other change. It" in plain and "the original" not in plain
    assert "from 2 to 2.125" in text and "| 0.01 | 2.5 |" in text and "| 99% | 32.1% |" in text
    of_the_source = ("against the fp32 source | source in bf16", "weights of the source", "source's weights again")
    assert all(said in plain and said not in text for said in of_the_source)
    assert "finetun" not in plain.partition("## What is proven")[0]
    states = {"measure": "relative squared error", "kl_bf16": 1e-5, "kl_fp16": None}
    text = card(tmp_path, fakes.conversion() | {"finetune": {"fidelity": states}}).text
    assert "| relative squared error of the last states | 1.00×10⁻⁵ | ∞ |" in text


def test_a_warning_is_put_first_and_once(tmp_path: Path) -> None:
    unsafe = fakes.conversion(safe=False)
    (tmp_path / "source").mkdir()
    write_card(tmp_path / "README.md", checkpoint(tmp_path / "source", readme=SOURCE_CARD), fakes.conversion())
    before = (tmp_path / "README.md").read_text()

    def warned(card: str, report: dict[str, Any]) -> str:
        return cards.warned(card, read(Report, report))

    after = warned(before, unsafe)
    assert ModelCard(after).data.to_dict() == ModelCard(before).data.to_dict()
    assert ModelCard(after).text.lstrip().startswith("> **Unsafe in fp16.** Overflows in half, first at ")
    goal = fakes.LIMIT | {"kind": "goal", "reason": "too little"}
    short = unsafe | {"regimes": fakes.conversion()["regimes"], "unsafe": [goal]}
    said = "\n> **Safe in fp16, but short of what was asked.** Too little; nothing overflowed on what was run"
    assert said in warned(before, short)
    assert warned(warned(before, short), unsafe).count("> **Unsafe in fp16") == 1
    assert warned(after, unsafe) == after and warned("plain", unsafe).lstrip().startswith("> **Unsafe")


def test_card_and_page_begin_with_what_was_measured_on_what(tmp_path: Path) -> None:
    report = fakes.conversion()
    assert "Measured on" not in card(tmp_path, report).text  # nobody knows on what
    kinds = ({"kind": kind, "batches": count} for kind, count in (("long", 1), ("padded", 3)))
    report["inputs"] = {"batches": [kind | {"rows": 4, "encoder": 8, "decoder": None} for kind in kinds]}
    report["environment"]["devices"] = {"audit": ["cuda:0 (a card)", "cpu"]}
    said = "Measured on: cuda:0 (a card) and cpu, 4 batches (long, padded)."
    assert card(tmp_path, report).text.split("\n\n")[1] == prose(said) and said in page.render(read(Report, report))
