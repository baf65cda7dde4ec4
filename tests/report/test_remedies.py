"""An unsafe or uncertified site is named with the reason and the remedy, in what audit, certify and convert return."""

import ast
import math
from pathlib import Path
from typing import Any

import pytest
from support import contract, parsed, tiny

from bf16_to_fp16 import audit, certify, cli, convert
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.report import remedies
from bf16_to_fp16.report.judgement import uncertified_sites
from bf16_to_fp16.report.remedies import next_command
from bf16_to_fp16.rescaling.plan import Fallback, Plan
from bf16_to_fp16.rescaling.planner import Planned
from bf16_to_fp16.results import AttackedSite, AttackEntry


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
    command = f"bf16-to-fp16 convert {source} theirs-fp16\n"  # as it was given, which the report does not keep
    assert out.startswith("unsafe: ") and out.count("unsafe: ") == out.count("\nnext: ") == 1 and out.endswith(command)
    assert report["next"].endswith("bf16-to-fp16 convert theirs theirs-fp16")


def test_a_certificate_that_does_not_hold_names_every_site(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = certify(source, target="norm-safe")
    assert report["next"].endswith("bf16-to-fp16 convert theirs theirs-fp16 --target norm-safe")
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
    told = {name for name in unproven if "holding it for every input" in reasons[name]}
    assert told == {name for name in unproven if ".decoder." in name} and told and unproven - told


def test_a_conversion_that_stays_unsafe_names_what_broke_when_run(tmp_path: Path) -> None:
    model = tiny.build("t5-encoder", num_layers=2)
    for name, weight in model.named_parameters():
        if name.endswith("wi_0.weight"):
            weight.data.mul_(1e5)
    report = convert(tiny.save(model, tmp_path / "theirs"), tmp_path / "out", exact=True).report
    assert report["verdict"] == "unsafe" and all(row["reason"] and row["remedy"] for row in report["unsafe"])
    broken = [row for row in report["unsafe"] if "regimes" in row]
    assert any(row["signal"].endswith("wi_0") and "finetune" in row["remedy"] for row in broken)
    # A regime is offered as a way out only if nothing broke in it.
    regimes = {regime for row in broken for regime in row["regimes"]}
    for row in broken:
        offered = row["remedy"].partition(", or use ")[2]
        assert all((name in offered) is (name not in regimes) for name in ("stock", "amp", "half"))


def test_each_reason_and_remedy_is_worded_in_one_place() -> None:
    worded = {value for value in vars(remedies).values() if isinstance(value, str) and " " in value}
    worded -= {remedies.__doc__}
    assert len(worded) > 10
    for path in set(parsed.package()) - {Path(remedies.__file__)}:
        said = [n.value for n in parsed.nodes(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        assert [text for text in said for words in worded if words in text] == [], path.name
