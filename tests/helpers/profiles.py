"""ICC profiles made from numbers: of a screen with a wide gamut, and of grey."""

import struct

import numpy as np

D50 = (0.9642, 1.0, 0.8249)
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
DISPLAY_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))  # red, green, blue as (x, y)
WHITE = (0.3127, 0.3290)


def wide_profile(gamma: float = 2.2) -> bytes:
    """A profile with Display P3's colours and a plain gamma."""
    curve = gamma_curve(gamma)
    columns = {name: xyz(column) for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries().T, strict=True)}
    return profile(b"RGB ", columns | {b"rTRC": curve, b"gTRC": curve, b"bTRC": curve})


def grey_profile(gamma: float = 1.8) -> bytes:
    return profile(b"GRAY", {b"kTRC": gamma_curve(gamma)})


def primaries() -> np.ndarray:
    """The colours of red, green and blue, for a viewer who is used to D50, as columns."""
    white = np.array([WHITE[0] / WHITE[1], 1, (1 - sum(WHITE)) / WHITE[1]])
    columns = np.array([(x / y, 1, (1 - x - y) / y) for x, y in DISPLAY_P3]).T
    columns = columns * np.linalg.solve(columns, white)
    adapt = np.linalg.inv(BRADFORD) @ np.diag((BRADFORD @ D50) / (BRADFORD @ white)) @ BRADFORD
    return np.asarray(adapt @ columns)


def profile(colours: bytes, tags: dict[bytes, bytes]) -> bytes:
    text = b"text" + bytes(4) + b"none\0"
    name = b"desc" + bytes(4) + struct.pack(">I", 5) + b"test\0" + bytes(78)
    tags = {b"desc": name, b"cprt": text, b"wtpt": xyz(D50)} | tags
    table, data, start = b"", b"", 128 + 4 + 12 * len(tags)
    for tag, content in tags.items():
        content += bytes(-len(content) % 4)
        table += tag + struct.pack(">II", start + len(data), len(content))
        data += content
    head = struct.pack(">I4sI4s4s4s", start + len(data), b"lcms", 0x02400000, b"mntr", colours, b"XYZ ")
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + xyz(D50)[8:] + bytes(48)
    return head + struct.pack(">I", len(tags)) + table + data


def gamma_curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def xyz(value: "np.ndarray | tuple[float, ...]") -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(float(one) * 65536) for one in value))
