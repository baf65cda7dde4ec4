"""What diffusers' pipeline classes read of their text encoders, as data.

Most read an encoder's last states, which a conversion leaves as they are. Some read inner ones, ``hidden_states[-2]``
or several layers of them: the residual stream, which a conversion multiplies with a power of two. What matters then is
what these meet first in the pipeline. A linear can carry the inverse power. A norm forgives a factor but for its eps.
Read in diffusers 0.42.1; ``tests/clients`` holds the names here against the installed version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

LAST = -1  # of ``hidden_states``; stock code has the last norm's output there


@dataclass(frozen=True)
class Linear:
    """A linear that states enter: the component that it is in, and its weight's name in that component's files.

    The weight has the columns of one state after another where several are concatenated.
    """

    component: str
    weight: str


@dataclass(frozen=True)
class Norm:
    """A norm that states enter: the component that it is in ("" for the pipeline's own code), its module there, and its
    eps, which the component's config may have under ``key``."""

    component: str
    module: str
    eps: float
    key: str = ""

    def eps_by(self, config: Mapping[str, Any]) -> float:
        """Return the eps by the component's config."""
        eps = config.get(self.key)
        return float(eps) if isinstance(eps, int | float) and not isinstance(eps, bool) else self.eps


@dataclass(frozen=True)
class Reading:
    """What a pipeline reads of an encoder at one place: numbers of its ``hidden_states`` (0 is the embedding; None for
    all of them), concatenated where they are several, and what these meet first.

    ``layers``: key of the config of the first that they meet, which lists layers, counted without the embedding: the
    states of each enter a linear of their own, whose place in the list stands for ``{}`` in the weight's name.
    """

    encoder: str
    states: tuple[int, ...] | None = (LAST,)
    meets: tuple[Linear | Norm, ...] = ()
    layers: str = ""

    @property
    def at_end(self) -> bool:
        """Whether nothing but the last states is read."""
        return self.states == (LAST,)

    def each(self, configs: Mapping[str, Mapping[str, Any]]) -> list[Reading]:
        """Return the readings that it stands for, one for each layer that a component's config lists."""
        if not self.layers:
            return [self]
        (linear,) = self.meets
        assert isinstance(linear, Linear)
        listed = configs.get(linear.component, {}).get(self.layers) or []
        return [
            Reading(
                self.encoder,
                (layer + 1 if layer >= 0 else layer,),
                (replace(linear, weight=linear.weight.format(i)),),
            )
            for i, layer in enumerate(listed)
        ]


def at_end(encoder: str) -> tuple[Reading, ...]:
    """Return the readings of a pipeline that takes the last states of one encoder."""
    return (Reading(encoder),)


REFINER = "context_embedder"
HUNYUAN_VIDEO = (
    Reading(
        "text_encoder",
        (-3,),
        # The refiner reads them twice: pooled, beside the time step, and position by position.
        (
            Linear("transformer", f"{REFINER}.proj_in.weight"),
            Linear("transformer", f"{REFINER}.time_text_embed.text_embedder.linear_1.weight"),
        ),
    ),
)

HUNYUAN_WITH_T5 = (*HUNYUAN_VIDEO, Reading("text_encoder_2"))  # which reads what is to be drawn as letters

FLUX2 = (Reading("text_encoder", (10, 20, 30), (Linear("transformer", "context_embedder.weight"),)),)
FLUX2_KLEIN = (Reading("text_encoder", (9, 18, 27), (Linear("transformer", "context_embedder.weight"),)),)
ERNIE_IMAGE = (Reading("text_encoder", (-2,), (Linear("transformer", "text_proj.weight"),)),)
NUCLEUS = (Reading("text_encoder", (-8,), (Norm("transformer", "txt_norm", 1e-6),)),)
BRIA_FIBO2 = (Reading("text_encoder", None, (Norm("", "_get_qwen_prompt_embeds", 1e-6),)),)

HIDREAM = (
    Reading("text_encoder_3"),
    Reading("text_encoder_4", None, (Linear("transformer", "caption_projection.{}.linear.weight"),), "llama_layers"),
)

ACE_STEP = (
    Reading("text_encoder"),
    Reading("text_encoder", (0,), (Linear("condition_encoder", "lyric_encoder.embed_tokens.weight"),)),
)

Z_IMAGE = (Reading("text_encoder", (-2,), (Norm("transformer", "cap_embedder.0", 1e-5, "norm_eps"),)),)

LUMINA2 = (
    Reading(
        "text_encoder",
        (-2,),
        (Norm("transformer", "time_caption_embed.caption_embedder.0", 1e-5, "norm_eps"),),
    ),
)

LUMINA = (
    Reading(
        "text_encoder",
        (-2,),
        (
            Norm("transformer", "time_caption_embed.caption_embedder.0", 1e-5),
            Norm("transformer", "layers.*.norm1_context", 1e-5, "norm_eps"),
        ),
    ),
)

# Its code normalises the states of each layer: by their range in LTX-2, token by token since 2.3.
LTX2 = (Reading("text_encoder", None, (Norm("connectors", "forward", 1e-6),)),)

LONGCAT_AUDIO = (Reading("text_encoder"), Reading("text_encoder", (0,), (Norm("", "encode_prompt", 1e-6),)))


def pipelines(names: str) -> tuple[str, ...]:
    """Return the classes of these names, each without its ``Pipeline``."""
    return tuple(f"{name}Pipeline" for name in names.split())


FLUX = pipelines(
    """
    Flux FluxControl FluxControlImg2Img FluxControlInpaint FluxControlNet FluxControlNetImg2Img
    FluxControlNetInpaint FluxFill FluxImg2Img FluxInpaint FluxKontext FluxKontextInpaint FluxPriorRedux VisualCloze
    VisualClozeGeneration
    """
)

STABLE_DIFFUSION_3 = pipelines(
    """
    StableDiffusion3 StableDiffusion3Img2Img StableDiffusion3Inpaint StableDiffusion3ControlNet
    StableDiffusion3ControlNetInpainting StableDiffusion3PAG StableDiffusion3PAGImg2Img
    """
)

ONE_ENCODER = pipelines(
    """
    Allegro AnyFlow AnyFlowFAR AuraFlow Bria Chroma ChromaImg2Img ChromaInpaint ChronoEdit CogVideoX
    CogVideoXFunControl CogVideoXImageToVideo CogVideoXVideoToVideo CogView3Plus ConsisID Cosmos2TextToImage
    Cosmos2VideoToWorld CosmosTextToWorld CosmosVideoToWorld DreamLite DreamLiteMobile GlmImage Helios
    HeliosPyramid IF IFImg2Img IFImg2ImgSuperResolution IFInpainting IFInpaintingSuperResolution IFSuperResolution
    Kandinsky3 Kandinsky3Img2Img Kandinsky5I2I Kandinsky5I2V Kandinsky5T2I Kandinsky5T2V Kandinsky6TI2VA Latte
    LongCatImage LongCatImageEdit LTX LTXCondition LTXI2VLongMultiPrompt LTXImageToVideo LucyEdit Mochi
    OvisImage PixArtAlpha PixArtSigma PixArtSigmaPAG QwenImage QwenImageControlNet QwenImageControlNetInpaint
    QwenImageEdit QwenImageEditInpaint QwenImageEditPlus QwenImageImg2Img QwenImageInpaint QwenImageLayered Sana
    SanaControlNet SanaImageToVideo SanaPAG SanaSprint SanaSprintImg2Img SanaVideo SanaWM SkyReelsV2
    SkyReelsV2DiffusionForcing SkyReelsV2DiffusionForcingImageToVideo SkyReelsV2DiffusionForcingVideoToVideo
    SkyReelsV2ImageToVideo StableAudio Wan WanAnimate WanImageToVideo WanVACE WanVideoToVideo
    """
)

SECOND_ENCODER = pipelines("AudioLDM2 HunyuanDiT HunyuanDiTControlNet HunyuanDiTPAG")

PIPELINES: Mapping[str, tuple[Reading, ...]] = {
    **dict.fromkeys(ONE_ENCODER, at_end("text_encoder")),
    **dict.fromkeys((*FLUX, *SECOND_ENCODER), at_end("text_encoder_2")),
    **dict.fromkeys(STABLE_DIFFUSION_3, at_end("text_encoder_3")),
    **dict.fromkeys(("HunyuanVideoPipeline", "HunyuanVideoFramepackPipeline"), HUNYUAN_VIDEO),
    **dict.fromkeys(pipelines("HunyuanSkyreelsImageToVideo HunyuanImageRefiner"), HUNYUAN_VIDEO),
    **dict.fromkeys(pipelines("HunyuanImage HunyuanVideo15 HunyuanVideo15ImageToVideo"), HUNYUAN_WITH_T5),
    "Flux2Pipeline": FLUX2,
    **dict.fromkeys(("Flux2KleinPipeline", "Flux2KleinInpaintPipeline", "Flux2KleinKVPipeline"), FLUX2_KLEIN),
    "HiDreamImagePipeline": HIDREAM,
    "ErnieImagePipeline": ERNIE_IMAGE,
    "NucleusMoEImagePipeline": NUCLEUS,
    "BriaFibo2Pipeline": BRIA_FIBO2,
    "AceStepPipeline": ACE_STEP,
    "LuminaPipeline": LUMINA,
    "Lumina2Pipeline": LUMINA2,
    **dict.fromkeys(
        pipelines("ZImage ZImageControlNet ZImageControlNetInpaint ZImageImg2Img ZImageInpaint ZImageOmni"), Z_IMAGE
    ),
    **dict.fromkeys(
        pipelines("LTX2 LTX2Condition LTX2DFR LTX2DFRTemporalRefine LTX2HDR LTX2InContext LTX2ImageToVideo"), LTX2
    ),
    "SanaWMLTX2Refiner": LTX2,
    "LongCatAudioDiTPipeline": LONGCAT_AUDIO,
}
"""What each pipeline class reads of its encoders of a supported family. Encoders of other families, such as CLIP, are
not converted and not listed."""

BEFORE_THE_NORM = (
    "reads what enters the last norm, by a hook, and none of what is known here makes up for a factor there"
)
READ_OTHERWISE: Mapping[str, str] = {
    "Krea2Pipeline": "adds inner states to a stream of its own, where nothing takes a factor out again",
    **dict.fromkeys(pipelines("JoyImageEdit JoyImageEditPlus QwenImage21"), BEFORE_THE_NORM),
}
"""Pipeline classes whose encoders stay as they are, with the reason."""
