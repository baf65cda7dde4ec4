"""The options of ``convert``: one field each, from which the command line, the published command and the API come."""

import math
import shlex
from pathlib import Path
from typing import get_args

import pytest

from bf16_to_fp16 import UserError, cli
from bf16_to_fp16.conversion.options import FLAGS, PUBLISHED, Options, parse_size
from bf16_to_fp16.targets import AUTO, TARGETS, AskedTarget

GIVEN = (
    "--target half --data x.txt --no-audit --subfolder encoder --config c.json --plan r.json --layout single"
    " --eps fixed --margin 0.5 --max-length 512 --max-shard-size 7B --seed 3 --sweep"
)
"""Every option that changes the output, in the order of the fields."""


def test_every_flag_is_an_option_of_convert() -> None:
    flags = {option for parameter in cli.app.commands["convert"].params for option in parameter.opts}
    assert flags >= {flag.name for flag in FLAGS.values()}
    assert set(FLAGS) - set(PUBLISHED) == {"device"}
    assert get_args(AskedTarget) == (AUTO, *TARGETS)  # which a recipe takes too


def test_a_published_command_asks_for_the_very_same_options() -> None:
    words = shlex.split(GIVEN)
    with cli.app.commands["convert"].make_context("convert", ["source", "out", *words]) as context:
        options = Options(**{name: context.params[name] for name in FLAGS})
    assert options.command("source", Path("out")) == f"bf16-to-fp16 convert source out {GIVEN}"
    assert Options().command("source", Path("out")) == "bf16-to-fp16 convert source out"


@pytest.mark.parametrize("text", ["much", "5", "-1GB", "0B", "1e30GB", "GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write it like 5GB"):
        parse_size(text)


@pytest.mark.parametrize("accepted", [math.inf, math.nan, 0.0, -1.0])
def test_what_is_no_distance_is_refused(accepted: float) -> None:
    """Without an end every output would be near enough, and a report could not say so."""
    with pytest.raises(UserError, match="no distance to accept"):
        Options(max_kl=accepted).check()
    Options(max_kl=0.01).check()


def test_a_plan_takes_no_margin_since_it_has_its_exponents() -> None:
    with pytest.raises(UserError, match="--plan has all that --margin would choose"):
        Options(plan="r.json", margin_bits=4.0).check()
    Options(plan="r.json").check()
