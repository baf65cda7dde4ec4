"""The measurements: RESULTS.md comes from the records, which their commands can write anew."""

import re
import sys
from pathlib import Path

import pytest
import results

ROOT = Path(__file__).parents[1]
NAMES = [name for names in results.SECTIONS.values() for name in names]


def test_the_page_is_what_the_records_make() -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page()
    assert sorted(NAMES) == sorted(path.stem for path in results.RECORDS.glob("*.json"))


def test_every_command_of_a_record_runs_a_script_or_a_command_that_there_is() -> None:
    for name in NAMES:
        command = results.read(name)["command"]
        scripts = re.findall(r"python (\S+\.py)", command)
        assert all((ROOT / script).is_file() for script in scripts)
        assert scripts or command.startswith(("bf16-to-fp16 ", "make ")), name


def test_what_the_readme_plans_for_are_measured_runs() -> None:
    table = results.read("whole")["tables"][0]
    runs = {(row[table["columns"].index("minutes")], row[table["columns"].index("peak GB")]) for row in table["rows"]}
    planned = results.tables_in((ROOT / "README.md").read_text(encoding="utf-8"))
    rows = next(each["rows"] for each in planned if each["columns"] == ["shape", "minutes", "memory"])
    assert rows and {(minutes, memory.removesuffix(" GB")) for _, minutes, memory in rows} <= {
        (minutes.strip("*"), peak) for minutes, peak in runs
    }


def test_a_command_run_again_replaces_its_tables_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RECORDS", tmp_path)
    script = tmp_path / "bench.py"
    script.write_text('print("noise")\nprint("| a | b |\\n|---|--:|\\n| 1 | x, y |\\n| 2 | z |\\nend")\n')
    before = {"command": f"{sys.executable} {script}", "what": "A question.", "reading": "An answer.", "tables": []}
    results.write("bench", before)
    results.run("bench")
    after = results.read("bench")
    assert after["tables"] == [{"columns": ["a", "b"], "rows": [["1", "x, y"], ["2", "z"]]}]
    assert after["reading"] == "An answer." and "torch" in after["where"]
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="ended with 3"):
        results.run("bench")
    assert results.read("bench") == after
