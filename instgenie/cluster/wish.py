"""The parameters of an edit as a client gives them, on their way from the request to the prepare process. Knows edits;
knows no model."""

from dataclasses import dataclass

from instgenie.jobs.quality import DEFAULT, Quality, with_quality
from instgenie.types import ControlUse, Edit, LoraUse, MaskedContent, PixelMask, Pixels, Reuse


@dataclass(frozen=True)
class Wish:
    """Parameters of an edit; the model chooses those that are None."""

    prompt: str
    seed: int
    negative_prompt: str = ""
    steps: int | None = None
    guidance: float | None = None
    true_guidance: float = 1.0
    strength: float = 1.0
    masked_content: MaskedContent = "original"
    feather: int = 0
    quality: Quality = DEFAULT
    reuse: Reuse = "auto"
    loras: tuple[LoraUse, ...] = ()  # with their files
    controls: tuple[ControlUse, ...] = ()  # with their folders
    from_nothing: bool = False  # the picture stands for none

    def edit(
        self,
        picture: Pixels,
        mask: PixelMask,
        own_steps: int,
        own_guidance: float,
        control_images: tuple[Pixels, ...] = (),
    ) -> Edit:
        """The complete edit, for a model whose default steps and guidance are given."""
        edit = Edit(
            picture=picture,
            mask=mask,
            prompt=self.prompt,
            seed=self.seed,
            steps=own_steps if self.steps is None else self.steps,
            guidance=own_guidance if self.guidance is None else self.guidance,
            true_guidance=self.true_guidance,
            negative_prompt=self.negative_prompt,
            strength=self.strength,
            masked_content=self.masked_content,
            feather=self.feather,
            reuse=self.reuse,
            loras=self.loras,
            controls=self.controls,
            control_images=control_images,
            from_nothing=self.from_nothing,
        )
        return with_quality(edit, self.quality)
