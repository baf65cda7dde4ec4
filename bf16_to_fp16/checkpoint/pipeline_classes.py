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

FLUX2_KLEIN = (Reading("text_encoder", (9, 18, 27), (Linear("transformer", "context_embedder.weight"),)),)

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

FLUX = (
    "FluxPipeline",
    "FluxControlPipeline",
    "FluxControlImg2ImgPipeline",
    "FluxControlInpaintPipeline",
    "FluxControlNetPipeline",
    "FluxControlNetImg2ImgPipeline",
    "FluxControlNetInpaintPipeline",
    "FluxFillPipeline",
    "FluxImg2ImgPipeline",
    "FluxInpaintPipeline",
    "FluxKontextPipeline",
    "FluxKontextInpaintPipeline",
    "FluxPriorReduxPipeline",
    "VisualClozePipeline",
    "VisualClozeGenerationPipeline",
)

STABLE_DIFFUSION_3 = (
    "StableDiffusion3Pipeline",
    "StableDiffusion3Img2ImgPipeline",
    "StableDiffusion3InpaintPipeline",
    "StableDiffusion3ControlNetPipeline",
    "StableDiffusion3ControlNetInpaintingPipeline",
    "StableDiffusion3PAGPipeline",
    "StableDiffusion3PAGImg2ImgPipeline",
)

ONE_ENCODER = (
    "AllegroPipeline",
    "AnyFlowPipeline",
    "AnyFlowFARPipeline",
    "AuraFlowPipeline",
    "BriaPipeline",
    "ChromaPipeline",
    "ChromaImg2ImgPipeline",
    "ChromaInpaintPipeline",
    "ChronoEditPipeline",
    "CogVideoXPipeline",
    "CogVideoXFunControlPipeline",
    "CogVideoXImageToVideoPipeline",
    "CogVideoXVideoToVideoPipeline",
    "CogView3PlusPipeline",
    "ConsisIDPipeline",
    "Cosmos2TextToImagePipeline",
    "Cosmos2VideoToWorldPipeline",
    "CosmosTextToWorldPipeline",
    "CosmosVideoToWorldPipeline",
    "GlmImagePipeline",
    "HeliosPipeline",
    "HeliosPyramidPipeline",
    "IFPipeline",
    "IFImg2ImgPipeline",
    "IFImg2ImgSuperResolutionPipeline",
    "IFInpaintingPipeline",
    "IFInpaintingSuperResolutionPipeline",
    "IFSuperResolutionPipeline",
    "Kandinsky3Pipeline",
    "Kandinsky3Img2ImgPipeline",
    "LTXPipeline",
    "LTXConditionPipeline",
    "LTXI2VLongMultiPromptPipeline",
    "LTXImageToVideoPipeline",
    "LattePipeline",
    "LucyEditPipeline",
    "MochiPipeline",
    "OvisImagePipeline",
    "PixArtAlphaPipeline",
    "PixArtSigmaPipeline",
    "PixArtSigmaPAGPipeline",
    "SanaPipeline",
    "SanaControlNetPipeline",
    "SanaImageToVideoPipeline",
    "SanaPAGPipeline",
    "SanaSprintPipeline",
    "SanaSprintImg2ImgPipeline",
    "SanaVideoPipeline",
    "SanaWMPipeline",
    "SkyReelsV2Pipeline",
    "SkyReelsV2DiffusionForcingPipeline",
    "SkyReelsV2DiffusionForcingImageToVideoPipeline",
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    "SkyReelsV2ImageToVideoPipeline",
    "StableAudioPipeline",
    "WanPipeline",
    "WanAnimatePipeline",
    "WanImageToVideoPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
)

SECOND_ENCODER = (
    "AudioLDM2Pipeline",
    "HunyuanDiTPipeline",
    "HunyuanDiTControlNetPipeline",
    "HunyuanDiTPAGPipeline",
    "HunyuanImagePipeline",
    "HunyuanVideo15Pipeline",
    "HunyuanVideo15ImageToVideoPipeline",
)

PIPELINES: Mapping[str, tuple[Reading, ...]] = {
    **dict.fromkeys(ONE_ENCODER, at_end("text_encoder")),
    **dict.fromkeys((*FLUX, *SECOND_ENCODER), at_end("text_encoder_2")),
    **dict.fromkeys(STABLE_DIFFUSION_3, at_end("text_encoder_3")),
    **dict.fromkeys(("HunyuanVideoPipeline", "HunyuanVideoFramepackPipeline"), HUNYUAN_VIDEO),
    "HunyuanSkyreelsImageToVideoPipeline": HUNYUAN_VIDEO,
    **dict.fromkeys(("Flux2KleinPipeline", "Flux2KleinInpaintPipeline", "Flux2KleinKVPipeline"), FLUX2_KLEIN),
    "HiDreamImagePipeline": HIDREAM,
    "AceStepPipeline": ACE_STEP,
    "LuminaPipeline": LUMINA,
    "Lumina2Pipeline": LUMINA2,
    **dict.fromkeys(
        (
            "ZImagePipeline",
            "ZImageControlNetPipeline",
            "ZImageControlNetInpaintPipeline",
            "ZImageImg2ImgPipeline",
            "ZImageInpaintPipeline",
            "ZImageOmniPipeline",
        ),
        Z_IMAGE,
    ),
    **dict.fromkeys(
        (
            "LTX2Pipeline",
            "LTX2ConditionPipeline",
            "LTX2DFRPipeline",
            "LTX2DFRTemporalRefinePipeline",
            "LTX2HDRPipeline",
            "LTX2InContextPipeline",
            "LTX2ImageToVideoPipeline",
            "SanaWMLTX2Refiner",
        ),
        LTX2,
    ),
    "LongCatAudioDiTPipeline": LONGCAT_AUDIO,
}
"""What each pipeline class reads of its encoders of a supported family. Encoders of other families, such as CLIP, are
not converted and not listed."""
