"""What a terminal shows and plain lines elsewhere; and what is unsafe is named with its reason and remedy."""

import ast
import math
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import contract, fakes, pages, parsed, tiny

from bf16_to_fp16 import audit, certify, cli
from bf16_to_fp16.families.known import FAMILIES, names_of
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report import remedies, terminal
from bf16_to_fp16.report.facts import accuracy
from bf16_to_fp16.report.judgement import uncertified_sites
from bf16_to_fp16.report.other_reports import Verification
from bf16_to_fp16.report.remedies import OVER, SQUARES_UNSEEN, next_command
from bf16_to_fp16.report.schema import FinetuneEntry, Report, read
from bf16_to_fp16.report.screen import console, print_families
from bf16_to_fp16.rescaling.plan import Fallback, Plan
from bf16_to_fp16.rescaling.planner import Planned
from bf16_to_fp16.results import AttackedSite, AttackEntry
from bf16_to_fp16.wording import headroom, magnitude, reached

BROKEN = {"kind": "broke", "regimes": ["half"], "reason": "1 inf/NaN in half", "remedy": "convert it"}
COLOUR = re.compile(r"\x1b\[[\d;]*\b(?:3[0-7]|9[0-7]|38;[\d;]+)m")
FRAME = re.compile("[\u2500-\u257f]")


def on_a_terminal(show: Callable[[], None], **variables: str) -> str:
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # how Linux says that the other side has closed
            while part := os.read(ours, 65536):
                shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(theirs, "w", encoding="utf-8") as opened:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        for name, value in ({"TERM": "xterm-256color", "COLUMNS": "100"} | variables).items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", opened)
        patch.setattr(sys, "stderr", opened)
        show()
    reader.join(60)
    os.close(ours)
    return shown.decode()


def work(seconds: float = 0.0) -> None:
    """Show a step of twelve parts that take so long each, a verdict and a table, as commands do."""
    with Progress().step("Working") as advance:
        for done in range(12):
            advance(done, 40)
            time.sleep(seconds)
    console().print(terminal.verdict_line(Report(verdict="safe", regimes={})))
    print_families([{"name": "t5", "model_type": "t5", "architectures": ["A"], "title": "T5"}])


def test_a_terminal_has_frames_a_bar_with_the_time_left_and_colours_unless_it_is_told_not_to_or_is_dumb() -> None:
    shown = on_a_terminal(lambda: work(0.12))
    assert COLOUR.search(shown) and FRAME.search(shown)
    assert "11/40" in shown and re.search(r"m0:00:0[1-9]\x1b", shown)
    assert "nothing was audited" in shown
    shown = on_a_terminal(lambda: work(0.02), NO_COLOR="1")
    assert not COLOUR.search(shown) and FRAME.search(shown) and "11/40" in shown
    shown = on_a_terminal(work, TERM="dumb")
    assert not re.search(r"\x1b\[\d*[A-JKhl?]", shown) and "Working" in shown


def test_elsewhere_a_step_is_a_line_and_a_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    printed = capsys.readouterr()
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert printed.err == "Working\n"
    assert lines == ["safe: nothing was audited", "family model_type architectures covers", "t5 t5 A T5"]


def test_a_long_name_is_neither_cut_nor_folded_nor_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    report, name = fakes.audit(), "decoder[/].[red]" + "very_long_module_name." * 12 + "wo"
    report["regimes"]["half"]["sites"][0]["name"] = name
    report["regimes"]["half"]["sites"][1] |= {"limit": None, "headroom_bits": None}
    report["unsafe"] = [BROKEN | {"signal": name}]
    terminal.print_audit(read(Report, report))
    shown = capsys.readouterr().out
    assert not FRAME.search(shown) and "\x1b" not in shown
    assert sum(name in line for line in shown.splitlines()) == 2  # in the verdict and among the sites
    measured = len(report["regimes"]["half"]["sites"])
    assert f"half: the first broken of {measured} sites that were measured" in shown
    assert sum(" no limit " in line for line in shown.splitlines()) == 1 and " - " not in shown


def in_columns(width: int, show: Callable[[], None]) -> list[str]:
    return re.sub(r"\x1b\[[\d;]*m", "", on_a_terminal(show, COLUMNS=str(width))).splitlines()


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_narrow_terminal_cuts_neither_a_number_nor_a_name_of_an_audit_or_of_families(width: int) -> None:
    report = read(Report, fakes.audit())
    lines = in_columns(width, lambda: terminal.print_audit(report))
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    columns = ["".join(row[i] for row in rows if len(row) == 7) for i in range(1, 4)]  # the tables of sites
    for site in report.regimes["half"].sites[:6]:
        assert site.name in columns[0] and reached(site.reached) in columns[1]
        assert headroom(site.headroom_bits).replace(" ", "") in columns[2].replace(" ", "")
    statuses: list[int] = []
    lines = in_columns(width, lambda: statuses.append(cli.main(["families"])))
    assert statuses == [0] and max(map(len, lines)) <= width and "…" not in "".join(lines)
    # A long word is folded, where nothing of it is lost.
    architectures = "".join(line.split("│")[3].strip() for line in lines if line.count("│") == 5)
    assert [name for family in FAMILIES for name in names_of(family) if name not in architectures] == []


def test_a_conversion_ends_with_source_output_and_loading(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = fakes.conversion()
    largest = max(made["signals"], key=lambda signal: signal["before"])
    terminal.print_conversion(read(Report, made), tmp_path)
    source, output, accuracy, training, load, then, page = capsys.readouterr().out.splitlines()
    assert accuracy.startswith("accuracy: about ") and then.endswith(f"bf16-to-fp16 verify {tmp_path}")
    assert source.startswith("source: overflows fp16 at ") and largest["module"] in source and " × over" in source
    for recipe, name in (({}, "trained weights, from a rescaled start"), ({"rescale": False}, "trained weights")):
        run = {"finetune": FinetuneEntry.model_construct(recipe=recipe)}
        trained = read(Report, made).model_copy(update=run)
        assert terminal.source_line(trained).plain.startswith(f"{name}: overflows fp16 at ")
        quiet = [signal.model_copy(update={"before": 1.0}) for signal in trained.signals]
        assert "plain fp16" not in terminal.source_line(trained.model_copy(update={"signals": quiet})).plain
    assert output.startswith("output: safe: nothing overflowed on what was run; ") and " × below the limit (" in output
    assert load == f'load: AutoModelForSeq2SeqLM.from_pretrained("{tmp_path}", dtype=torch.float16).half()'
    assert training.startswith("to train it: the folder's README.md, ")
    assert page == f"report: {tmp_path / 'fp16_report.html'}"
    calm = [signal | {"before": signal["before"] / largest["before"]} for signal in made["signals"]]
    terminal.print_conversion(read(Report, made | {"signals": calm}), tmp_path)
    said = capsys.readouterr().out
    assert said.startswith("source: did not overflow on what was run; its largest value, 1, is 65,499 ×")
    broken = fakes.audit()["regimes"]
    unsafe = {"verdict": "unsafe", "regimes": broken, "next": "finetune it: bf16-to-fp16 finetune r.yaml"}
    terminal.print_conversion(read(Report, made | unsafe), tmp_path)
    source, output, _, remedy, page = capsys.readouterr().out.splitlines()
    assert output.startswith("output: unsafe: overflows in half, first at encoder.block.2.layer.1.DenseReluDense.wo; ")
    assert remedy.startswith("next: ") and "bf16-to-fp16 finetune" in remedy and page.startswith("report: ")


@pytest.mark.parametrize(
    ("bits", "proof", "told"), [(0.39, "observed", True), (0.39, "certified", False), (2, "observed", False)]
)
def test_a_thin_margin_is_told(bits: float, proof: str, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = fakes.conversion() | {"proof": proof}
    report["regimes"]["half"]["headroom_bits"] = bits
    proven = {"holds": proof == "certified", "headroom_bits": 1.0, "max_length": 512, "splits": 8, "sites": []}
    report |= {"certificate": proven, "target": "half"}
    terminal.print_audit(read(Report, report))
    assert ("other input may come nearer" in capsys.readouterr().out) == told


def test_what_is_left_out_is_counted_and_next_said_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = fakes.audit() | {"unsafe": [BROKEN | {"signal": f"site.{i}"} for i in range(9)]}
    terminal.print_audit(read(Report, broken))
    said = capsys.readouterr().out
    assert said.count("unsafe: ") == 1 and "by design" not in said  # an empty column
    made = fakes.conversion(safe=False)
    terminal.print_conversion(read(Report, made), tmp_path, then="finetune it: exactly so")
    said = capsys.readouterr().out
    assert said.count("next: finetune it: exactly so\n") == said.count("next: ") == 1 and "load: " not in said


def test_bounds_are_told_with_arithmetic_and_headroom(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sites = [pages.bound("a (sum of squares)", "squares", 6e4), pages.bound("a:add", "residual", 800.0)]
    proof = {"holds": True, "headroom_bits": sites[0]["headroom_bits"], "max_length": 512, "splits": 8, "sites": sites}
    made = fakes.conversion() | {"target": "norm-safe", "certificate": proof}
    proven = "with norms in fp16 1.09 × below the limit (0.12 bits)"
    terminal.print_conversion(read(Report, made), tmp_path)
    said = capsys.readouterr().out
    assert "proven for every input of up to 512 positions;" in said
    assert f"any input: {proven} (proven; a proof needs no margin)" in said
    terminal.print_certificate(read(Report, made))
    said = capsys.readouterr().out
    assert "by bounds at 2 sites\n" in said and "by bounds with norms in fp16" in said
    assert said.count(proven) == 1
    over = pages.bound("a (sum of squares)", "squares", 131_008.0)
    terminal.print_certificate(read(Report, made | {"certificate": proof | {"holds": False, "sites": [over]}}))
    said = capsys.readouterr().out
    assert "not proven at 1 of 1 site with norms in fp16" in said and "2 × over" in said


def test_a_finetune_says_how_far_it_went_and_of_whom(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def said(report: dict[str, Any]) -> str:
        terminal.print_conversion(read(Report, report), tmp_path)
        return " ".join(capsys.readouterr().out.split())

    run = {"steps": 9, "evaluations": [{"held_out_divergence": 3.0}, {"held_out_divergence": 0.0271}]}
    made = fakes.conversion()
    trained = made | {"finetune": run | {"fidelity": {"kl_fp16": 1.25}}}
    moved = "KL to the original is 0.0271 nats per token on held-out data and 1.25 on the audit's inputs"
    assert f"; {moved} " in said(trained)
    assert "from the original was not measured" in said(made | {"finetune": {"steps": 9}})
    assert "KL to the fp32 source" in said(made) and "KL to the finetuned weights in fp32" in said(trained)


def test_a_dry_run_begins_with_what_would_become_of_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    made, plan = read(Report, fakes.conversion()), Plan.model_validate(fakes.conversion()["plan"])
    after = max(signal.after for signal in made.signals)
    terminal.print_planned(made, Planned(plan, (), 0.0))
    source, then, verdict = capsys.readouterr().out.splitlines()
    assert source.startswith("source: overflows fp16 at ") and verdict.startswith("safe: no input would drive")
    assert then.startswith(f"after: the largest of these values would be {magnitude(after)}")


def test_the_runtimes_that_were_asked_for_and_are_not_shown_have_their_reason() -> None:
    tiers: dict[str, dict[str, object]] = {
        "torch": {"holds": True, "proof": "certified", "runtimes": []},
        "norm-fp16": {"holds": False, "proof": None, "runtimes": [], "reason": "squares vanish"},
        "fp16-accumulate": {"holds": False, "proof": None, "runtimes": [], "reason": "sums are too long"},
    }
    for target, why in (("norm-safe", " (squares vanish)"), ("half", "")):
        said = f"safe in: PyTorch: yes, proven · ONNX and TensorRT: no{why} · sums in fp16: no"
        assert terminal.runtimes_line(Report.model_validate({"target": target, "tiers": tiers})) == said
        made = {"schema": 1, "verdict": "safe", "target": target, "tiers": tiers}
        line = terminal.verdict_line(read(Report, made), "output: ").plain
        there = ": nothing was audited"
        whole = f" in PyTorch{there}; with norms in fp16: no, squares vanish" if why else there
        assert line == f"output: safe{whole}"
    tiers["norm-fp16"]["reason"], least = OVER, fakes.conversion(safe=False)["regimes"]
    unproven = Report.model_validate({"target": "half", "tiers": tiers})
    assert "ONNX and TensorRT: not proven · " in terminal.runtimes_line(unproven)
    ran = read(Report, {"schema": 1, "tiers": tiers, "regimes": least})
    assert "ONNX and TensorRT: no · " in terminal.runtimes_line(ran)
    tiers["norm-fp16"]["reason"] = SQUARES_UNSEEN  # where nothing was run
    said = "safe in: PyTorch: yes, proven · ONNX and TensorRT: not known · sums in fp16: no"
    assert terminal.runtimes_line(Report.model_validate({"target": "half", "tiers": tiers})) == said


def test_help_begins_with_convert_and_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:\n")[2]
    assert commands.lstrip().startswith("convert ") and "..." not in commands
    assert "and say whether it is safe." in " ".join(commands.split())


def verified(**changes: object) -> Verification:
    claim = {"verdict": "safe", "proof": "certified", "family": "t5"}
    bounds = {"holds": True, "headroom_bits": 1.0, "max_length": 512, "splits": 8, "train_mode": False}
    found: dict[str, object] = {"verdict": "safe", "verified": True, "source": {}, "report": claim, "files": 6}
    found |= {"checks": {"files": "passed"}, "problems": [], "certificate": bounds, "tiers": {}, "regimes": {}}
    ran = {"device": "cuda:0 (a card)", "devices": {"audit": ["cuda:0 (a card)", "cpu"]}}
    found |= {"schema": 1, "environment": ran}
    return read(Verification, found | changes)


def test_verify_says_first_where_it_ran_and_last_what_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_verification(verified(target="half"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device: cuda:0 (a card) and cpu"
    assert lines[-1].endswith("proven in PyTorch for every input of up to 512 positions; nothing was run")
    terminal.print_verification(verified(edits=3))
    assert capsys.readouterr().out.rstrip().endswith("; edited at 3 sites")
    terminal.print_verification(verified(environment={"device": "cpu"}))
    assert capsys.readouterr().out.startswith("device: cpu\n")


@pytest.mark.parametrize(
    ("bf16", "fp16", "begins"),
    [(1e-3, 1e-6, "about 1,000 × closer"), (0.0, 1e-9, "over 1,000,000 × further"), (1e-3, -1e-17, "KL to the fp32")],
)
def test_accuracy_is_told_in_few_digits(bf16: float, fp16: float, begins: str) -> None:
    fidelity = {"measure": "kl", "reference": "fp32 source", "kl_bf16": bf16, "kl_fp16": fp16}
    said = accuracy(read(Report, fakes.conversion() | {"fidelity": fidelity}))
    assert said.startswith(begins) and len(said) < 100


def test_an_eps_that_is_held_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for stacks in (("encoder", "decoder"), ("encoder",)):
        made = fakes.conversion(stacks=stacks)
        made["plan"] |= {"eps": 1e-6, "eps_held": True}
        terminal.print_conversion(read(Report, made), tmp_path)
        said = capsys.readouterr().out
        assert "eps: 1e-06, fixed by the program that runs the" in said and ("KL" in said) == (len(stacks) == 2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build("t5-encoder", num_layers=2), tmp_path_factory.mktemp("source") / "theirs")


def site(name: str, *, tokens: float, half: float, limit: float = FP16_MAX) -> AttackedSite:
    worst = max(tokens, half)
    bits = math.log2(limit / worst) if worst < math.inf else -math.inf
    found: dict[str, Any] = {"worst": worst, "random": 1.0, "embeddings": 2.0}
    return AttackedSite(name=name, tokens=tokens, half=half, limit=limit, headroom_bits=bits, ids=None, **found)


def test_of_what_a_search_breaks_those_are_named_that_pass_their_limit_themselves() -> None:
    def found(*sites: AttackedSite) -> list[tuple[str, float]]:
        attack = AttackEntry(steps=5, seed=0, worst_headroom_bits=-1.0, sites=list(sites))
        return [(row.signal, row.excess_bits) for row in remedies.overflowing(attack)]

    scores, after = site("scores", tokens=2 * FP16_MAX, half=math.inf), site("wo", tokens=5.0, half=math.inf)
    assert found(site("calm", tokens=9.0, half=9.0)) == []
    assert found(after, scores) == [("scores", 1.0)]
    # At the edge only fp16's own rounding passes it.
    assert found(after) == [("wo", 0.0)]
    assert found(site("square", tokens=400.0, half=9.0, limit=100.0)) == [("square", 2.0)]


def test_an_audit_names_every_site_that_broke(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = audit(source, regimes=("amp", "half"))
    sites = [site for regime in report["regimes"].values() for site in regime["sites"]]
    broken = {site["name"] for site in sites if site["nonfinite"] or site["saturated"]}
    assert {row["signal"] for row in report["unsafe"]} == broken and broken
    for row in report["unsafe"]:
        in_half = next((s for s in report["regimes"]["half"]["sites"] if s["name"] == row["signal"]), None)
        assert (" inf/NaN" in row["reason"] or " saturated" in row["reason"]) and "convert rescales" in row["remedy"]
        assert "half" not in row["regimes"] or (in_half is not None and row["nonfinite"] >= in_half["nonfinite"])
        assert row["excess_bits"] >= 0 and set(row["regimes"]) <= {"amp", "half"}
    assert report["source"]["path"] == "theirs"
    assert cli.main(["audit", str(source), "--regime", "half"]) == 1
    out = capsys.readouterr().out
    command = f"bf16-to-fp16 convert {source} theirs-fp16\n"
    assert out.startswith("unsafe: ") and out.count("unsafe: ") == out.count("\nnext: ") == 1 and out.endswith(command)
    assert report["next"] == f"convert it: {command}".rstrip()


def test_a_certificate_that_does_not_hold_names_every_site(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = certify(source, target="norm-safe")
    assert report["next"].endswith(f"bf16-to-fp16 convert {source} theirs-fp16 --target norm-safe")
    on = next_command("out", {}, True, None, "norm-safe")
    assert on.startswith("convert its source with --target norm-safe, ") and '"target": "norm-safe"' in on
    report = certify(source)
    over = {site["name"] for site in report["certificate"]["sites"] if not site["holds"]}
    assert {row["name"] for row in report["uncertified"]} == over and over
    assert all(row["reason"] and row["remedy"] and row["excess_bits"] > 0 for row in report["uncertified"])
    assert cli.main(["certify", str(source)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("not certified: ") and out.count("\nnext: ") == 1 and out.count("bf16-to-fp16 convert") == 1
    # Each site once, in the table, with the reason.
    worst = report["uncertified"][0]["name"]
    assert sum(line.startswith(f"{worst} ") for line in out.splitlines()) == out.count(f"{worst} ") == 1
    assert report["uncertified"][0]["reason"] in out


def test_what_no_rescaling_moves_is_told_from_what_it_does(source: Path) -> None:
    report = certify(source, max_length=64)
    kinds = {site["name"]: site["kind"] for site in report["certificate"]["sites"]}
    for row in report["uncertified"]:
        fixed = kinds[row["name"]] in ("scores", "masked scores", "gate", "activation", "logits", "position bias")
        assert ("finetune" in row["remedy"]) is fixed and ("convert" in row["remedy"]) is not fixed


def test_a_site_of_a_stream_is_told_what_became_of_that_stream() -> None:
    layout, certificate = contract.certified(tiny.build("mbart"))
    _, decoder = layout.streams
    given_up = Planned(Plan(family="mbart"), (), 1.0, (Fallback(decoder, False, -3),))
    reasons = {row.name: row.reason for row in uncertified_sites(layout, certificate, given_up)}
    unproven = {site.name for site in certificate.sites if site.kind == "residual"} & reasons.keys()
    told = {name for name in unproven if "keeping it under the limit for every input" in reasons[name]}
    assert told == {name for name in unproven if ".decoder." in name} and told and unproven - told


def test_each_reason_and_remedy_is_worded_in_one_place() -> None:
    worded = {value for value in vars(remedies).values() if isinstance(value, str) and " " in value}
    worded -= {remedies.__doc__}
    assert len(worded) > 10
    for path in set(parsed.package()) - {Path(remedies.__file__)}:
        said = [n.value for n in parsed.nodes(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        assert [text for text in said for words in worded if words in text] == [], path.name
