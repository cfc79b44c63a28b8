"""One file per model family: a ragged forward over the modules of diffusers' own models."""
