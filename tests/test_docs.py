"""The documentation: its links lead somewhere, its commands are ones that the program has, its Python runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import torch
import transformers
import yaml
from support import contract, tiny
from transformers import AutoModelForSeq2SeqLM

from bf16_to_fp16 import cli, families
from bf16_to_fp16.families import known
from bf16_to_fp16.finetuning.recipe import parse_recipe

ROOT = Path(__file__).parents[1]
DEMO = str(files("bf16_to_fp16") / "demo_data" / "t5-gated-bytes")
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_site_builds_and_every_link_in_it_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} < written.keys()
    assert not [name for name, html in written.items() if "fonts.g" in html]


def slugs(path: Path) -> set[str]:
    """Return the anchors of a Markdown file's headings, as repository viewers make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_a_link_in_the_repository_leads_to_a_file_and_a_heading(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in (link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not urlsplit(link).scheme):
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in slugs(target), link


def blocks(path: Path, *languages: str) -> list[str]:
    """Return the code blocks of a Markdown file in the given languages; "" is a block without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


def commands(path: Path) -> Iterator[list[str]]:
    """Yield every command of ours that a Markdown file shows, as arguments: lines of blocks, and inline code."""
    for block in blocks(path, "", "bash", "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            yield from ours(line.removeprefix("$ "))
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        yield from ours(code)


def ours(line: str) -> Iterator[list[str]]:
    """Yield the command of a line if it is one of ours, without its comment and what it is piped into."""
    for start in ("bf16-to-fp16 ", ".venv/bin/bf16-to-fp16 "):
        if line.startswith(start):
            words = shlex.split(line, comments=True)[1:]
            end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", "…", "...")), len(words))
            yield words[:end]
    if line.startswith("accelerate launch ") and " -m bf16_to_fp16 " in line:
        yield shlex.split(line.partition(" -m bf16_to_fp16 ")[2], comments=True)


def parse(words: list[str]) -> None:
    """Parse a command as the program would, and run nothing; raise click's error for what it does not know."""
    if not words or words[0] in ("-h", "--help", "--version"):
        return
    command = cli.app.get_command(click.Context(cli.app), words[0])
    assert command is not None, f"no command {words[0]}"
    if len(words) == 1:
        return  # named in a sentence
    if words[1].startswith("-") and not any(not word.startswith("-") for word in words[1:]):
        # An option that is spoken of, without what it needs beside it.
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(words[1:]) <= known | {"-h", "--help"}, words
        return
    plain = [word if word not in ("N", "STEPS", "BITS") else "1" for word in words]
    context = command.make_context(words[0], plain[1:])
    if isinstance(command, click.Group):
        inner = command.get_command(context, plain[1])
        assert inner is not None, words
        if plain[2:]:  # else named in a sentence
            inner.make_context(plain[1], plain[2:], parent=context)


def test_every_command_shown_is_one_that_the_program_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = 0
    for path in TEXTS:
        for words in commands(path):
            try:
                parse(words)
            except click.exceptions.Exit:
                pass  # --help
            except click.ClickException as error:
                raise AssertionError(f"{path.name}: {shlex.join(words)}: {error.format_message()}") from error
            seen += 1
    assert seen > 40


@pytest.mark.parametrize(
    ("words", "wanted"),
    [(["conv"], {"convert"}), (["convert", "--target", "n"], {"norm-safe"}), (["audit", "--tr"], {"--train-mode"})],
)
def test_the_line_for_bash_completes(words: list[str], wanted: set[str]) -> None:
    line = re.search(r"`(eval .*bash_source.*?)`", (ROOT / "docs/index.md").read_text(encoding="utf-8"))
    assert line is not None
    at = f"COMP_WORDS=(bf16-to-fp16 {shlex.join(words)}); COMP_CWORD={len(words)}"
    script = f"{line[1]}\n{at}; _bf16_to_fp16_completion bf16-to-fp16; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert (set(done.stdout.split()), done.stderr) == (wanted, "")


def every_command() -> Iterator[click.Command]:
    """Yield the commands of the program, of a group those in it."""
    for command in cli.app.commands.values():
        yield from command.commands.values() if isinstance(command, click.Group) else [command]


def test_paths_are_completed_where_a_command_takes_them() -> None:
    for command in every_command():
        for parameter in command.params:
            path = {"source", "out", "SOURCE", "OUT", "DIR", "FILE", "LIST", "OUTDIR", "RECIPE", "REPORT"} & {
                parameter.name,
                parameter.metavar,
            }
            assert not path or isinstance(parameter.type, click.Path), (command.name, parameter.name)


def test_every_option_spoken_of_is_one_of_the_program() -> None:
    known = {"-h", "--help", "--version"}
    known |= {option for command in every_command() for each in command.params for option in each.opts}
    spoken = {
        (path.name, code.split()[0].partition("=")[0])
        for path in TEXTS
        for code in re.findall(r"`(--[^`\n]+)`", path.read_text(encoding="utf-8"))
    }
    assert not [place for place in spoken if place[1] not in known]
    assert len(spoken) > 20


def test_every_make_target_shown_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    shown = {
        t
        for path in [*TEXTS, ROOT / "CONTRIBUTING.md"]
        for t in re.findall(r"\bmake ([a-z-]+)\b(?=[ `]*[`#\n])", path.read_text())
    }
    assert {"demo", "test"} <= shown <= targets


def test_every_script_and_test_shown_exists() -> None:
    shown = {
        (path.name, script)
        for path in TEXTS
        for script in re.findall(r"python (?:-m pytest )?([\w/]+\.py)", path.read_text())
    }
    assert not [place for place in shown if not (ROOT / place[1]).is_file()]
    assert len(shown) > 2


SNIPPETS = {f"{path.stem}-{i}": code for path in TEXTS for i, code in enumerate(blocks(path, "python"))}


@pytest.mark.parametrize("code", SNIPPETS.values(), ids=SNIPPETS)
def test_a_python_block_compiles_and_its_names_exist(code: str) -> None:
    compile(code, "block", "exec")
    for line in re.findall(r"^from bf16_to_fp16[\w.]* import .+$", code, re.MULTILINE):
        exec(line, {})


@pytest.mark.usefixtures("first_batch")
def test_the_python_of_the_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", DEMO, "flan-t5-base-fp16"]) == 0
    Path("bf16_to_fp16").symlink_to(ROOT / "bf16_to_fp16")
    ran = 0
    for path in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("index", "audit", "report"))):
        for code in blocks(path, "python"):
            if "loader" in code or "Trainer" in code:
                continue  # needs training data: examples/ has the whole of it
            code = code.replace('"google/flan-t5-base"', repr(DEMO))
            # That folder is there, from the same conversion on the command line; a second one runs no model.
            again = r'= convert(\1, "again", run_model=False\2)'
            code = re.sub(r'= convert\((.+?), "flan-t5-base-fp16"(.*)\)', again, code)
            names: dict[str, Any] = {}
            if "rescale(model)" in code:
                names["model"] = AutoModelForSeq2SeqLM.from_pretrained(DEMO).float()
            exec(compile(code, path.name, "exec"), names)
            if "tightest" in names:
                assert names["tightest"]("flan-t5-base-fp16").startswith("safe: encoder.block.")
            ran += 1
    assert ran >= 4 and Path("again").is_dir()


def test_the_penalty_in_a_loop_runs_as_the_page_has_it() -> None:
    (code,) = [code for code in blocks(ROOT / "docs" / "finetuning.md", "python") if "def train(" in code]
    names: dict[str, Any] = {}
    exec(compile(code, "finetuning.md", "exec"), names)
    model = AutoModelForSeq2SeqLM.from_pretrained(DEMO, attn_implementation="eager").float()
    before = model.lm_head.weight.clone()
    row = {"input_ids": torch.tensor([[5, 6, 1]]), "labels": torch.tensor([[7, 1]])}
    names["train"](model, [row, row], torch.optim.SGD(model.parameters(), lr=1e-3))
    assert not torch.equal(model.lm_head.weight, before)


def test_the_family_of_the_page_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's file is a family as it stands: registered here, a small model of it goes through the checks."""
    (code,) = [code for code in blocks(ROOT / "docs" / "families.md", "python") if "BLENDERBOT = replace(" in code]
    names: dict[str, Any] = {"__package__": families.__name__, "__name__": f"{families.__name__}.blenderbot"}
    exec(compile(code, "families.md", "exec"), names)
    monkeypatch.setattr(known, "FAMILIES", (*known.FAMILIES, names["BLENDERBOT"]))

    def blenderbot(**changes: Any) -> Any:
        shape = tiny.PEGASUS_SHAPE | changes
        return transformers.BlenderbotForConditionalGeneration(transformers.BlenderbotConfig(**shape))

    (code,) = [code for code in blocks(ROOT / "docs" / "families.md", "python") if "BLENDERBOT = Entry(" in code]
    entry: dict[str, Any] = {"Entry": tiny.Entry, "blenderbot": blenderbot}
    exec(compile(code, "families.md", "exec"), entry)
    monkeypatch.setattr(tiny, "ENTRIES", (*tiny.ENTRIES, entry["BLENDERBOT"]))
    monkeypatch.setitem(tiny.KINDS, "blenderbot", blenderbot)
    contract.check_classified(tiny.build("blenderbot"))
    contract.check_couplings(tiny.build("blenderbot"), 1)
    assert not contract.certified(tiny.build("blenderbot"))[1].holds  # as the contract wants it before a conversion
    layout, certificate = contract.certified(tiny.build("blenderbot", factor=1.0))
    assert certificate.holds and layout.family.name == "blenderbot"
    assert any(site.name == "model.encoder.embed_tokens:mul" for site in certificate.sites)


def test_the_recipe_keys_shown_are_keys() -> None:
    settings = parse_recipe({"source": "a", "out": "b", "data": {"path": "c"}}).describe()
    known = {key for key, value in settings.items() if not isinstance(value, dict)}
    known |= {f"{part}.{key}" for part, value in settings.items() if isinstance(value, dict) for key in value}
    page = (ROOT / "docs" / "finetuning.md").read_text()
    shown = re.findall(
        r"`((?:data|optimizer|schedule|penalty|distillation|evaluation|logging|stability)\.[\w.]+)`", page
    )
    assert len(shown) > 8 and set(shown) <= known
    for path in TEXTS:
        for block in blocks(path, "yaml"):
            entries = yaml.safe_load(block)
            flat = {f"{k}.{i}" for k, v in entries.items() if isinstance(v, dict) for i in v}
            assert flat | {k for k, v in entries.items() if not isinstance(v, dict)} <= known


WIDTH = 120
WRITTEN = [
    *TEXTS,
    ROOT / "CONTRIBUTING.md",
    *(ROOT / name / "README.md" for name in ("launch", "recipes", "recipes/demo")),
]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_line_is_no_longer_than_120_characters(path: Path) -> None:
    """Tables, what stands in blocks, and lines that are one picture or address cannot be broken."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in prose.splitlines() if len(line) > WIDTH and not line.startswith(("|", "![", "http"))]
    assert long == []
