"""A sentence encoder of Qwen3-Embedding's kind, which a text's first word breaks: found, mended to the bit, proven."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import exhaustive, tiny, words
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from bf16_to_fp16 import audit, certify, convert, verify

pytestmark = pytest.mark.usefixtures("whole_probe")

SHAPE = {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
WORDS = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(SHAPE["vocab_size"] - 4))]
WORDS.insert(200, "import")
IMPORT = WORDS.index("import")
SITE = "model.layers.1.mlp:mul"
PROMPTS = {"query": "w7 w8 w9 ", "document": ""}
SAFE = [f"w{i} w{3 * i} import w{5 * i} w{7 * i}" for i in range(20)]
BROKEN = ["import w5", "import w9 w200 w31 w4"]


# The library is imported where it is used: that takes longer than most tests.
def save(model: Any, folder: Path, *, dense: bool = False, pooling: str = "mean", **options: Any) -> Path:
    """Add a model to a folder with its tokenizer, pooling, normalisation and, with ``dense``, a linear behind it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    tiny.save(model, folder)
    torch.manual_seed(0)
    encoder = Transformer(str(folder))
    width = encoder.get_embedding_dimension()
    modules = [encoder, Pooling(width, pooling_mode=pooling)]
    if dense:
        modules.append(Dense(width, 16, activation_function=torch.nn.Tanh()))
        modules[-1].linear.weight.data.mul_(0.3)
    SentenceTransformer(modules=[*modules, Normalize()], device="cpu", **options).save(str(folder))
    for weights in folder.glob("*.safetensors"):  # it saves the class without a head, in fp32
        weights.unlink()
    return tiny.save(model, folder)


def embeddings(folder: Path, texts: list[str], dtype: torch.dtype, **options: Any) -> Tensor:
    """Return fp64 [texts, width] of modules that all compute in ``dtype``; options: of ``encode``."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    for module in model:
        module.to(dtype)
    return torch.tensor(model.encode(texts, **options)).double()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder. One gated neuron reads what the word makes of the stream where nothing is before it."""
    folder = tmp_path_factory.mktemp("last") / "source"
    torch.manual_seed(0)
    model = tiny.KINDS["qwen3"](**SHAPE, tie_word_embeddings=True).eval()
    mlp, read = model.model.layers[1].mlp, []
    hook = mlp.register_forward_pre_hook(lambda _, args: read.append(args[0][0, 0].detach()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.where(parameter.abs() < 2.0**-10, 0, parameter).bfloat16())  # fp16 holds each
        model(torch.tensor([[IMPORT]]))
        hook.remove()
        direction = read[0] / read[0].square().sum()
        mlp.gate_proj.weight[0] = (direction * 300).bfloat16()
        mlp.up_proj.weight[0] = (direction * 270).bfloat16()
        mlp.down_proj.weight[:, 0] *= 2.0**-8
    # Of words; an end is put behind each text, whose state is the text's.
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>", "padding_side": "left"}
    folder.mkdir()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return save(model, folder, pooling="lasttoken", prompts=PROMPTS)


def test_one_text_in_fp16_is_nan_and_audit_attack_and_certificate_find_it(source: Path) -> None:
    assert bool(embeddings(source, SAFE, torch.float16).isfinite().all())
    assert bool(embeddings(source, BROKEN, torch.float16).isnan().all())
    report = audit(source, regimes=("half",), attack_steps=1)
    reasons = [reason for reason, ids in report["inputs"]["chosen"].items() if IMPORT in ids]
    assert report["verdict"] == "unsafe" and reasons == ["largest alone"]
    sites = {site["name"]: site for site in report["regimes"]["half"]["sites"]}
    assert sites[SITE]["nonfinite"] > 0
    attacked = {site["name"]: site["embeddings"] for site in report["attack"]["sites"]}
    bounds = {site["name"]: site["bound"] for site in certify(source)["certificate"]["sites"]}
    assert 65504 < attacked[SITE] <= bounds[SITE]


def test_the_conversion_mends_it_exactly_and_is_proven_to_the_last_states(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = convert(source, out)
    assert result.safe and result.report["proof"] == "certified" and not result.report.get("inexact")
    assert "2_Normalize:div" in {site["name"] for site in result.report["regimes"]["half"]["sites"]}
    for texts in (SAFE, BROKEN):
        wanted = embeddings(source, texts, torch.float32)
        assert torch.equal(embeddings(out, texts, torch.float32), wanted)
        found = embeddings(out, texts, torch.float16)
        assert float(torch.cosine_similarity(found, wanted).min()) > 0.9999
    for name in PROMPTS:
        made = embeddings(out, SAFE, torch.float32, prompt_name=name)
        assert torch.equal(made, embeddings(source, SAFE, torch.float32, prompt_name=name)), name
    kept = json.loads((out / "config_sentence_transformers.json").read_text())["prompts"]
    assert kept == PROMPTS and not torch.equal(made, embeddings(out, SAFE, torch.float32, prompt_name="query"))
    assert verify(out, run_model=False)["verified"]


KINDS: dict[str, dict[str, Any]] = {"qwen3": {"tie_word_embeddings": True}}
# Of t5 as of sentence-t5, which is a whole model, the encoder alone is loaded.
KINDS |= {kind: {} for kind in ("gemma3", "gemma2", "llama", "t5-encoder", "t5")}


@pytest.mark.parametrize("kind", exhaustive.beyond(["gemma3"], KINDS))
def test_an_embedding_in_fp16_is_that_of_the_source_in_fp32(kind: str, tmp_path: Path) -> None:
    source = save(tiny.small(kind, **KINDS[kind]), words.save(tmp_path / "source"), dense=True)
    convert(source, tmp_path / "out", run_model=False)
    wanted = embeddings(source, words.TEXTS, torch.float32)

    def cosine(folder: Path, dtype: torch.dtype) -> Tensor:
        return torch.cosine_similarity(embeddings(folder, words.TEXTS, dtype), wanted).min()

    for dtype in (torch.float32, torch.float16):
        assert cosine(tmp_path / "out", dtype) > 0.99999
    assert not cosine(source, torch.float16) > 0.9999  # NaN; T5 clamps its stream
