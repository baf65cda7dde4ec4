"""A batch's labels, what a model is told of its padding, and what a report says of the inputs."""

import json
from pathlib import Path

import torch
from support import tiny
from support.words import TEXTS

from bf16_to_fp16.run.batch import IGNORED_LABEL, Batch, describe_batches, run_batch
from bf16_to_fp16.run.probe import audit_batches, batches


def test_labels_are_the_following_ids_without_padding() -> None:
    ids = torch.tensor([[0, 5, 6, 7], [0, 8, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = Batch("", ids, mask, ids, mask).labels()
    skip = IGNORED_LABEL
    assert labels.tolist() == [[5, 6, 7, skip], [8, skip, skip, skip]]


def test_the_decoder_is_told_of_its_padding() -> None:
    model = tiny.KINDS["t5"]().eval()
    batch = batches(model.config, None, None)[3]
    told: list[torch.Tensor] = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: told.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        run_batch(model, batch)
    assert batch.decoder_attention_mask is not None
    assert torch.equal(told[0], batch.decoder_attention_mask)


def test_the_inputs_are_listed_by_kind_with_their_shapes() -> None:
    made = batches(tiny.config("t5", vocab_size=5000), None, None, sweep=True)
    listed = describe_batches(made, seed=0)
    assert listed["seed"] == 0 and listed["data"] is None
    assert [tuple(entry.values()) for entry in listed["batches"]] == [
        ("random ids", 1, 4, 64, 32),
        ("long", 1, 1, 512, 128),
        ("repeated", 1, 2, 64, 32),
        ("padded", 1, 4, 48, 24),
        ("short", 2, 44, 8, 4),
        ("vocabulary sweep", 6, 40, 128, 128),
        ("generate", 1, 2, 48, None),
    ]
    assert list(listed["batches"][0]) == ["kind", "batches", "rows", "encoder", "decoder"]
    assert sum(len(b.input_ids) for b in made) == sum(entry["rows"] for entry in listed["batches"])
    encoder = describe_batches(batches(tiny.config("t5-encoder"), None, None), seed=0)
    assert {entry["decoder"] for entry in encoder["batches"]} == {None}


def test_the_inputs_digest_tells_the_same_tokens_from_others(source: Path, tmp_path: Path) -> None:
    config = tiny.config("t5")
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))

    def digest(seed: int = 0, data: str | None = None) -> str:
        return str(describe_batches(audit_batches(config, source, data, seed=seed), seed=seed, data=data)["sha256"])

    assert digest() == digest()
    assert digest(data=str(path)) == digest(data=str(path))
    assert len({digest(), digest(seed=1), digest(data=str(path))}) == 3
    first = digest(data=str(path))
    path.write_text("\n".join([*TEXTS[1:], "cat"]))
    assert digest(data=str(path)) != first
    one, other = batches(config, None, None)[:1], batches(config, None, None)[:1]
    other[0].attention_mask[0, -1] = 0
    assert describe_batches(one, seed=0)["sha256"] != describe_batches(other, seed=0)["sha256"]


def test_of_data_the_inputs_name_the_file_without_its_folder_and_the_rows(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    listed = describe_batches(batches(tiny.config("t5"), source, str(path)), seed=3, data=str(path))
    assert listed["data"] == {"name": "texts.txt", "rows": 4}
    assert [entry["kind"] for entry in listed["batches"]] == ["data", "generate"]
    assert str(tmp_path) not in json.dumps(listed)
    assert describe_batches([], seed=0, data="org/name")["data"] == {"name": "org/name", "rows": 0}
