"""Captions and their variants. Knows words, no model."""

import re

from instgenie.bench.photos import Photos

COLOURS = ("black", "white", "grey", "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown")
SPECIES_WORDS = {
    "cat": ("a photo of a cat", "a cat", "cat", "kitten"),
    "dog": ("a photo of a dog", "a dog", "dog", "puppy"),
    "flower": ("a photo of a flower", "a flower", "flower", "flowers"),
    "clothing": ("a photo of clothes", "clothes", "clothing", "garment"),
}
BACKGROUND_CAPTIONS = ("background", "nothing", "an empty background", "a photo of the background", "empty", "remove")


def caption_variants(caption: str, label: str, species: str) -> list[str]:
    """Eight variants of a caption, from the whole sentence to the species alone; each is drawn equally often."""
    phrase = caption.removeprefix("a photo of ")
    bare = re.sub(r"^(an?|pair of|a pair of) ", "", phrase)
    grey = caption.replace(" grey ", " gray ")
    return [caption, caption, grey, phrase, phrase, bare, label.lower(), _species_caption(species, label)]


def _species_caption(species: str, label: str) -> str:
    words = SPECIES_WORDS[species]
    return words[sum(map(ord, label)) % len(words)]


def recoloured(caption: str, colour: str, new: str) -> str:
    """`a photo of a red hat` -> `a photo of an orange hat`."""
    caption = re.sub(rf"\b{colour}\b", new, caption)
    return re.sub(r"\ban? (?=\w)(\w)", lambda m: ("an " if m[1] in "aeiou" else "a ") + m[1], caption)


def vocabulary(photos: Photos) -> list[str]:
    """Every word of the captions, in a fixed order."""
    texts = [*BACKGROUND_CAPTIONS, *COLOURS, "gray", "an", *(w for words in SPECIES_WORDS.values() for w in words)]
    for caption, label, species in zip(photos.captions, photos.labels, photos.species, strict=True):
        texts += caption_variants(caption, label, species)
    return sorted({word for text in texts for word in text.lower().split()})
