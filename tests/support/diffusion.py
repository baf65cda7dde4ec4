"""Tiny pipelines of diffusers' own classes, whose text encoders overflow fp16, and one step of what they condition.

VAEs are left out, since nothing here decodes; weights are random, tokenizers of single bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from support import causal, pipelines
from tokenizers.pre_tokenizers import ByteLevel

PROMPT = "a lighthouse in a storm"
LENGTH = 32  # tokens of a prompt
WIDTH = 24  # of every encoder here

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
CLIP = {"hidden_size": 8, "intermediate_size": 9, "num_attention_heads": 2, "num_hidden_layers": 1}
CLIP |= {"projection_dim": 8, "max_position_embeddings": 218}


@dataclass(frozen=True)
class Case:
    """A pipeline class: what makes one, what its ``encode_prompt`` takes besides the prompt, and what its transformer
    (or the like) gives for what that returns. encoders: the components to be converted."""

    kind: str
    make: Callable[[], Mapping[str, Any]]
    step: Callable[[Any, Sequence[torch.Tensor]], torch.Tensor]
    options: Mapping[str, Any]
    encoders: tuple[str, ...] = ("text_encoder",)

    def build(self) -> Any:
        """Return the pipeline, its encoders in bf16 and all else in fp32."""
        return getattr(diffusers, self.kind)(**self.make())

    def encode(self, pipe: Any) -> list[torch.Tensor]:
        """Return every tensor that ``encode_prompt`` returns, floating ones in fp32."""
        with torch.no_grad():
            return [t.float() if t.is_floating_point() else t for t in flat(pipe.encode_prompt(PROMPT, **self.options))]

    def run(self, pipe: Any, embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what one step gives, in fp32."""
        torch.manual_seed(1)
        with torch.no_grad():
            return torch.cat([t.flatten() for t in flat(self.step(pipe, embeddings))])


def flat(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for each in value or () for t in flat(each)] if isinstance(value, list | tuple) else []


# --- components ------------------------------------------------------------------------------------------------------


def encoder(kind: str, **changes: Any) -> Any:
    """Return a tiny encoder in bf16 that overflows fp16."""
    return pipelines.encoder(kind, **changes).to(torch.bfloat16)


def headless(kind: str, **changes: Any) -> Any:
    """Return the body of a tiny causal model, which pipelines load."""
    return encoder(kind, **changes).model


def loud(model: Any) -> Any:
    """Return a tiny encoder, whose stream fits fp16, with a neuron in each layer that does not: its row is larger by a
    power of two and its column smaller, which changes nothing that the encoder computes."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("up_proj.weight"):
                weight[:1] *= 2.0**20
            elif name.endswith("down_proj.weight"):
                weight[:, :1] *= 2.0**-20
    return model


def t5(kind: str = "t5-encoder") -> dict[str, Any]:
    return {"text_encoder": encoder(kind), "tokenizer": transformers.ByT5Tokenizer(extra_ids=125)}


def of_bytes() -> Any:
    """Return a tokenizer of single bytes with a chat template."""
    tokenizer = causal.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


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
    """Return a component of diffusers in fp32, of random weights."""
    torch.manual_seed(3)
    made = getattr(diffusers, kind)(**shape).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if not weight.any():  # some begin as zeros, which would hide everything
                weight.normal_(std=0.1)
    return made


def quiet(transformer: Any, *weights: str) -> Any:
    """Return a transformer whose linears of these names bring the states of an encoder, which are large, to the size of
    what is added to them there, as in trained ones; else the next norm would hide any factor."""
    with torch.no_grad():
        for name in weights:
            transformer.get_parameter(name).mul_(2.0**-18)
    return transformer


def flow() -> dict[str, Any]:
    return {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "vae": None}


def steps() -> dict[str, Any]:
    return {"scheduler": diffusers.DDIMScheduler(), "vae": None}


AT = torch.tensor([500.0])


# --- pipelines -------------------------------------------------------------------------------------------------------

SMALL = HEADS | {"in_channels": 4, "num_layers": 1}
SAME = SMALL | {"out_channels": 4}
SINGLE = {"num_single_layers": 1}
AXES = (4, 4, 8)
LATENTS, FRAMES = (1, 4, 8, 8), (1, 4, 1, 4, 4)


def of_clip(*places: str, projected: bool = False) -> dict[str, Any]:
    """Return a CLIP and its tokenizer for each place, "" or "_2"."""
    made = [{f"text_encoder{n}": clip(projected), f"tokenizer{n}": clip_tokenizer()} for n in places]
    return {name: part for each in made for name, part in each.items()}


def t5_at(place: str) -> dict[str, Any]:
    return {f"{name}{place}": part for name, part in t5().items()}


def of_bytes_with(encoder: Any) -> dict[str, Any]:
    return {"text_encoder": encoder, "tokenizer": of_bytes()}


def flux() -> dict[str, Any]:
    own = {"joint_attention_dim": WIDTH, "pooled_projection_dim": 8, "axes_dims_rope": AXES}
    transformer = model("FluxTransformer2DModel", **SMALL, **SINGLE, **own)
    return {**flow(), **of_clip(""), **t5_at("_2"), "transformer": transformer}


def flux_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    ids = torch.zeros(4, 3)
    latents = torch.randn(1, 4, 4)
    return pipe.transformer(latents, e[0], e[1], AT / 1000, img_ids=ids, txt_ids=e[2], return_dict=False)


def sd3() -> dict[str, Any]:
    own = {"sample_size": 8, "joint_attention_dim": WIDTH, "caption_projection_dim": 32}
    own |= {"pooled_projection_dim": 16, "pos_embed_max_size": 8}
    encoders = of_clip("", "_2", projected=True) | t5_at("_3")
    return {**flow(), **encoders, "transformer": model("SD3Transformer2DModel", **SAME, **own)}


def sd3_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(LATENTS), e[0], e[1], AT, return_dict=False)


def pixart() -> dict[str, Any]:
    shape = SMALL | {"out_channels": 8, "cross_attention_dim": 32, "sample_size": 8, "caption_channels": WIDTH}
    return {**steps(), **t5(), "transformer": model("PixArtTransformer2DModel", **shape)}


def pixart_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    sizes = {"resolution": None, "aspect_ratio": None}
    options = {"added_cond_kwargs": sizes, "encoder_attention_mask": e[1], "return_dict": False}
    return pipe.transformer(torch.randn(LATENTS), e[0], AT.long(), **options)


def ltx() -> dict[str, Any]:
    own = {"cross_attention_dim": 32, "caption_channels": WIDTH}
    return {**flow(), **t5(), "transformer": model("LTXVideoTransformer3DModel", **SAME, **own)}


def ltx_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    sizes = {"num_frames": 2, "height": 2, "width": 2}
    return pipe.transformer(torch.randn(1, 8, 4), e[0], AT, encoder_attention_mask=e[1], **sizes, return_dict=False)


def cogvideox() -> dict[str, Any]:
    own = {"time_embed_dim": 8, "text_embed_dim": WIDTH, "max_text_seq_length": LENGTH}
    own |= {"sample_width": 4, "sample_height": 4, "sample_frames": 5}
    return {**steps(), **t5(), "transformer": model("CogVideoXTransformer3DModel", **SAME, **own)}


def cogvideox_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(1, 2, 4, 4, 4), e[0], AT, return_dict=False)


def auraflow() -> dict[str, Any]:
    shape = HEADS | {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1}
    shape |= {"joint_attention_dim": WIDTH, "caption_projection_dim": 32, "pos_embed_max_size": 16}
    return {**flow(), **t5("umt5-encoder"), "transformer": model("AuraFlowTransformer2DModel", **shape)}


def auraflow_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(LATENTS), e[0], AT / 1000, return_dict=False)


def wan() -> dict[str, Any]:
    own = {"text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32}
    return {**flow(), **t5("umt5-encoder"), "transformer": model("WanTransformer3DModel", **SAME, **own)}


def wan_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(FRAMES), AT.long(), e[0], return_dict=False)


def sana() -> dict[str, Any]:
    shape = {"in_channels": 4, "out_channels": 4, "num_layers": 1, "sample_size": 8, "caption_channels": WIDTH}
    shape |= {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32}
    return {
        **flow(),
        **of_bytes_with(headless("gemma2")),
        "transformer": model("SanaTransformer2DModel", **HEADS, **shape),
    }


def sana_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(LATENTS), e[0], AT, encoder_attention_mask=e[1], return_dict=False)


def lumina2() -> dict[str, Any]:
    shape: dict[str, Any] = {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "multiple_of": 16}
    shape |= {"num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1}
    shape |= {"axes_dim_rope": AXES, "axes_lens": (64, 16, 16), "cap_feat_dim": WIDTH}
    return {
        **flow(),
        **of_bytes_with(loud(headless("gemma2", factor=10.0))),
        "transformer": model("Lumina2Transformer2DModel", **shape),
    }


def lumina2_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(LATENTS), AT / 1000, e[0], e[1], return_dict=False)


def z_image() -> dict[str, Any]:
    shape: dict[str, Any] = {"in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2}
    shape |= {"n_kv_heads": 2, "cap_feat_dim": WIDTH, "axes_dims": list(AXES), "axes_lens": [128, 16, 16]}
    return {
        **flow(),
        **of_bytes_with(loud(headless("qwen3", factor=10.0))),
        "transformer": model("ZImageTransformer2DModel", **shape),
    }


def z_image_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer([torch.randn(4, 1, 8, 8)], AT / 1000, [e[0]], return_dict=False)


def hunyuan_video() -> dict[str, Any]:
    own = {"num_refiner_layers": 1, "guidance_embeds": False, "text_embed_dim": WIDTH, "rope_axes_dim": AXES}
    transformer = model("HunyuanVideoTransformer3DModel", **SAME, **SINGLE, **own, pooled_projection_dim=8)
    encoders = of_bytes_with(loud(headless("llama", num_hidden_layers=4, factor=10.0))) | of_clip("_2")
    return {**flow(), **encoders, "transformer": transformer}


def hunyuan_video_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(FRAMES), AT.long(), e[0], e[2], e[1], return_dict=False)


def hidream() -> dict[str, Any]:
    own = {"patch_size": 2, "num_single_layers": 2, "caption_channels": [WIDTH, WIDTH], "text_emb_dim": 16}
    own |= {"num_routed_experts": 2, "num_activated_experts": 1, "axes_dims_rope": AXES}
    own |= {"max_resolution": (16, 16), "llama_layers": [0, 1, 2]}
    transformer = model("HiDreamImageTransformer2DModel", **SMALL, **own)
    return {
        **flow(),
        **of_clip("", "_2", projected=True),
        **t5_at("_3"),
        "text_encoder_4": loud(encoder("llama", num_hidden_layers=3, attn_implementation="eager", factor=10.0)),
        "tokenizer_4": of_bytes(),
        "transformer": quiet(transformer, *(f"caption_projection.{i}.linear.weight" for i in range(3))),
    }


def hidream_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(LATENTS), AT.long(), e[0], e[1], e[2], return_dict=False)[0]


def flux2_klein() -> dict[str, Any]:
    own = {"joint_attention_dim": 3 * WIDTH, "timestep_guidance_channels": 8, "axes_dims_rope": (4, 4, 4, 4)}
    transformer = model("Flux2Transformer2DModel", **SMALL, **SINGLE, **own, guidance_embeds=False)
    encoders = of_bytes_with(loud(encoder("qwen3", num_hidden_layers=28, max_window_layers=28, factor=10.0)))
    return {**flow(), **encoders, "transformer": quiet(transformer, "context_embedder.weight")}


def flux2_klein_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    ids = torch.zeros(1, 4, 4)
    latents = torch.randn(1, 4, 4)
    return pipe.transformer(latents, e[0], AT / 1000, ids, e[1], None, return_dict=False)


def flux2() -> dict[str, Any]:
    """Return Flux 2 dev, which reads three inner layers of a Mistral 3."""
    return {**flux2_klein(), "text_encoder": loud(encoder("mistral3", num_hidden_layers=31, factor=10.0))}


def hunyuan_image() -> dict[str, Any]:
    own = {"num_refiner_layers": 1, "text_embed_dim": WIDTH, "text_embed_2_dim": WIDTH, "rope_axes_dim": (8, 8)}
    transformer = model("HunyuanImageTransformer2DModel", **SAME, **SINGLE, **own)
    linears = ("context_embedder.proj_in.weight", "context_embedder.time_text_embed.text_embedder.linear_1.weight")
    encoders = of_bytes_with(loud(encoder("qwen2_5_vl", num_hidden_layers=4, factor=10.0))) | t5_at("_2")
    return {**flow(), **encoders, "transformer": quiet(transformer, *linears)}


def hunyuan_image_step(pipe: Any, e: Sequence[torch.Tensor]) -> Any:
    return pipe.transformer(torch.randn(1, 4, 4, 4), AT, e[0], e[1], None, e[2], e[3], return_dict=False)


ALONE = {"do_classifier_free_guidance": False}
SHORT = {"max_sequence_length": LENGTH}
PROMPTS = {"prompt_2": None, "prompt_3": None}
CROPPED = {"prompt_template": {"template": "{}", "crop_start": 0}}
CASES = (
    Case("FluxPipeline", flux, flux_step, SHORT, ("text_encoder_2",)),
    Case("StableDiffusion3Pipeline", sd3, sd3_step, SHORT | ALONE | PROMPTS, ("text_encoder_3",)),
    Case("PixArtAlphaPipeline", pixart, pixart_step, SHORT | ALONE),
    Case("LTXPipeline", ltx, ltx_step, SHORT | ALONE),
    Case("CogVideoXPipeline", cogvideox, cogvideox_step, SHORT | ALONE),
    Case("AuraFlowPipeline", auraflow, auraflow_step, SHORT | ALONE),
    Case("WanPipeline", wan, wan_step, SHORT | ALONE),
    Case("SanaPipeline", sana, sana_step, SHORT | ALONE),
    Case("Lumina2Pipeline", lumina2, lumina2_step, SHORT | ALONE | {"system_prompt": "draw"}),
    Case("ZImagePipeline", z_image, z_image_step, SHORT | ALONE),
    Case("HunyuanVideoPipeline", hunyuan_video, hunyuan_video_step, SHORT | CROPPED),
    Case("HiDreamImagePipeline", hidream, hidream_step, SHORT | ALONE, ("text_encoder_3", "text_encoder_4")),
    Case("Flux2KleinPipeline", flux2_klein, flux2_klein_step, SHORT),
    Case("Flux2Pipeline", flux2, flux2_klein_step, SHORT),
    Case("HunyuanImagePipeline", hunyuan_image, hunyuan_image_step, {}, ("text_encoder", "text_encoder_2")),
)
