"""A folder of captioned photographs in tar shards, with invented pictures."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from instgenie.bench.photos import is_validation

ROWS = (("cat", "Siamese", "a photo of a Siamese cat"), ("flower", "rose", "a photo of a rose"))


def encode(pixels: np.ndarray, file_format: str) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, file_format)
    return data.getvalue()


def add_file(tar: tarfile.TarFile, path: str, data: bytes) -> None:
    member = tarfile.TarInfo(path)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_photos(folder: Path, num_val: int, num_train: int) -> None:
    """Smooth pictures, cats and roses in turn; ids are tried until each split has enough."""
    generator = np.random.default_rng(0)
    ids = [f"photo_{number}" for number in range(200 * (num_val + num_train))]
    held_out = [name for name in ids if is_validation(name)][:num_val]
    chosen = held_out + [name for name in ids if not is_validation(name)][:num_train]
    lines = ["id,source,species,label,color,caption,shard"]
    with tarfile.open(folder / "all-00.tar", "w") as tar:
        for number, name in enumerate(chosen):
            species, label, caption = ROWS[number % 2]
            lines.append(f"{name},made,{species},{label},,{caption},all-00.tar")
            small = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
            files = {f"{name}.webp": encode(np.array(small.resize((256, 256), Image.Resampling.BICUBIC)), "WEBP")}
            if species == "cat":
                outline = np.zeros((256, 256), dtype=np.bool_)
                outline[60:200, 80:180] = True
                files[f"{name}.mask.png"] = encode(outline, "PNG")
            for path, data in files.items():
                add_file(tar, path, data)
    lines.append("elsewhere,made,cat,Siamese,,a cat,not-there.tar")
    (folder / "captions.csv").write_text("\n".join(lines) + "\n")
