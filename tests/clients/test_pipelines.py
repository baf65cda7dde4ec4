"""Tiny pipelines of diffusers: converted they take the same step in fp32, and in fp16 a nearer one than in bf16."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.utils import logging
from support import causal, exhaustive, pipelines, tiny
from tokenizers.pre_tokenizers import ByteLevel

from bf16_to_fp16 import convert_pipeline
from bf16_to_fp16.conversion.pipeline import READ_AT_THE_END, READ_INSIDE
from bf16_to_fp16.families.known import named

logging.set_verbosity_error()

ROUNDING = 1e-6  # of fp32, over all layers
PROMPT = "a lighthouse in a storm"
LENGTH = 32  # tokens of a prompt
WIDTH = 24  # of every encoder here

ALONE = {"do_classifier_free_guidance": False}
SHORT = {"max_sequence_length": LENGTH}
CLIP = {"hidden_size": 8, "intermediate_size": 9, "num_attention_heads": 2, "num_hidden_layers": 1}
CLIP |= {"projection_dim": 8, "max_position_embeddings": 218}


@dataclass(frozen=True)
class Case:
    """A pipeline class and its parts; encoders: to be converted; quiet: weights that bring large states down."""

    kind: str
    transformer: str
    parts: Callable[[], Mapping[str, Any]]
    shape: Mapping[str, Any]
    step: Callable[[Any, Sequence[torch.Tensor]], Any]
    options: Mapping[str, Any] = field(default_factory=lambda: SHORT | ALONE)
    encoders: tuple[str, ...] = ("text_encoder",)
    quiet: tuple[str, ...] = ()

    def build(self) -> Any:
        transformer = model(self.transformer, **self.shape)
        for name in self.quiet:
            transformer.get_parameter(name).data.mul_(2.0**-18)
        others = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "vae": None, "transformer": transformer}
        return getattr(diffusers, self.kind)(**others, **self.parts())

    def encode(self, pipe: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [t.float() if t.is_floating_point() else t for t in flat(pipe.encode_prompt(PROMPT, **self.options))]

    def run(self, pipe: Any, embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(1)
        with torch.no_grad():
            made = self.step(partial(pipe.transformer, return_dict=False), embeddings)
            return torch.cat([t.flatten() for t in flat(made)])


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for each in value or () for t in flat(each)] if isinstance(value, list | tuple) else []


def encoder(kind: str, **changes: Any) -> Any:
    return pipelines.encoder(kind, **changes).to(torch.bfloat16)


def loud(model: Any) -> Any:
    """Return a tiny encoder whose stream fits fp16, with a neuron in each layer that does not."""
    for name, weight in model.named_parameters():
        if name.endswith("up_proj.weight"):
            weight.data[:1] *= 2.0**20
        elif name.endswith("down_proj.weight"):
            weight.data[:, :1] *= 2.0**-20
    return model


def t5(kind: str = "t5-encoder", place: str = "") -> dict[str, Any]:
    return {f"text_encoder{place}": encoder(kind), f"tokenizer{place}": transformers.ByT5Tokenizer(extra_ids=125)}


def clip_tokenizer() -> Any:
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def clip(projected: bool = False) -> Any:
    torch.manual_seed(2)
    config = transformers.CLIPTextConfig(**CLIP, vocab_size=514, bos_token_id=512, eos_token_id=513)
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config).eval()


def model(kind: str, **shape: Any) -> Any:
    torch.manual_seed(3)
    made = getattr(diffusers, kind)(**shape).eval()
    for weight in made.parameters():
        if not weight.any():  # some begin as zeros, which would hide everything
            weight.data.normal_(std=0.1)
    return made


def of_clip(*places: str, projected: bool = False) -> dict[str, Any]:
    made = [{f"text_encoder{n}": clip(projected), f"tokenizer{n}": clip_tokenizer()} for n in places]
    return {name: part for each in made for name, part in each.items()}


def of_bytes_with(encoder: Any, place: str = "") -> dict[str, Any]:
    tokenizer = causal.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return {f"text_encoder{place}": encoder, f"tokenizer{place}": tokenizer}


def hidream_encoders() -> dict[str, Any]:
    llama = loud(encoder("llama", num_hidden_layers=3, factor=10.0, attn_implementation="eager"))
    return of_clip("", "_2", projected=True) | t5(place="_3") | of_bytes_with(llama, "_4")


AT = torch.tensor([500.0])
SMALL = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1}
SAME = SMALL | {"out_channels": 4}
AXES = (4, 4, 8)
LATENTS, FRAMES = (1, 4, 8, 8), (1, 4, 1, 4, 4)

CASES = (
    Case(
        *("FluxPipeline", "FluxTransformer2DModel", lambda: of_clip("") | t5(place="_2")),
        SMALL
        | {"num_single_layers": 1, "joint_attention_dim": WIDTH, "pooled_projection_dim": 8, "axes_dims_rope": AXES},
        lambda net, e: net(torch.randn(1, 4, 4), e[0], e[1], AT / 1000, img_ids=torch.zeros(4, 3), txt_ids=e[2]),
        SHORT,
        ("text_encoder_2",),
    ),
    Case(
        *("WanPipeline", "WanTransformer3DModel", lambda: t5("umt5-encoder")),
        SAME | {"text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32},
        lambda net, e: net(torch.randn(FRAMES), AT.long(), e[0]),
    ),
    Case(
        *("SanaPipeline", "SanaTransformer2DModel", lambda: of_bytes_with(encoder("gemma2").model)),
        SAME
        | {"sample_size": 8, "caption_channels": WIDTH}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32},
        lambda net, e: net(torch.randn(LATENTS), e[0], AT, encoder_attention_mask=e[1]),
    ),
    Case(
        *("HiDreamImagePipeline", "HiDreamImageTransformer2DModel", hidream_encoders),
        SMALL
        | {"patch_size": 2, "num_single_layers": 2, "caption_channels": [WIDTH, WIDTH], "text_emb_dim": 16}
        | {"num_routed_experts": 2, "num_activated_experts": 1, "axes_dims_rope": AXES}
        | {"max_resolution": (16, 16), "llama_layers": [0, 1, 2]},
        lambda net, e: net(torch.randn(LATENTS), AT.long(), e[0], e[1], e[2])[0],
        encoders=("text_encoder_3", "text_encoder_4"),
        quiet=tuple(f"caption_projection.{i}.linear.weight" for i in range(3)),
    ),
)


def load(folder: Path) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, vae=None)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def in_16_bits(case: Case, pipe: Any, dtype: torch.dtype) -> torch.Tensor:
    for name in case.encoders:
        getattr(pipe, name).to(dtype)
    return case.run(pipe, case.encode(pipe))


@pytest.mark.parametrize("case", exhaustive.beyond(CASES[1:], CASES), ids=lambda case: case.kind)
def test_a_pipeline_is_converted_for_the_classes_that_load_it_and_takes_the_same_step(
    case: Case, tmp_path: Path
) -> None:
    case.build().save_pretrained(tmp_path / "source")
    whole = case.kind == "SanaPipeline"  # with the head, which is the embedding and which the pipeline does not load
    if whole:
        tiny.save(encoder("gemma2"), tmp_path / "source" / "text_encoder")
    done = convert_pipeline(tmp_path / "source", tmp_path / "out", run_model=False)
    assert done.safe and {*done.encoders} == {*case.encoders}
    assert not whole or "--as Gemma2Model" in done.encoders["text_encoder"].report["command"]
    plans = [one.report["plan"] for one in done.encoders.values()]
    assert all(plan["residual_exponent"] or plan["exponents"] for plan in plans)  # else nothing was put to the test
    for one in done.encoders.values():
        outputs, family = one.report["outputs"], named(one.report["family"])
        assert family is not None and outputs["last_hidden_state"]["factor_log2"] == 0
        if family.decoder is None and case.kind == "HiDreamImagePipeline":  # which reads inner states of one stack
            assert outputs["hidden_states"]["factor_log2"] == 0
    source, converted = load(tmp_path / "source"), load(tmp_path / "out")
    wanted = case.run(source, case.encode(source))
    assert error(case.run(converted, case.encode(converted)), wanted) < ROUNDING
    in_fp16 = error(in_16_bits(case, converted, torch.float16), wanted)
    assert in_fp16 < error(in_16_bits(case, source, torch.bfloat16), wanted)
    overflowing = error(in_16_bits(case, load(tmp_path / "source"), torch.float16), wanted)
    assert not overflowing < 100 * in_fp16


def test_the_classes_that_read_last_states_alone_are_there() -> None:
    assert all(hasattr(diffusers, kind) for kind in READ_AT_THE_END | READ_INSIDE)
