"""A server that loads its weights in another form says how much it has loaded, and serves edits."""

import json
from pathlib import Path

import numpy as np
from helpers.serving import edit, mask, picture, pixels, running_server


def test_a_server_with_fp8_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    with running_server(tmp_path, str(folders["sd_fill"]), "--weights-dtype", "fp8", "--dtype", "bfloat16") as server:
        edited = pixels(edit(server))
        assert np.array_equal(edited[~mask()], picture()[~mask()])
        assert not np.array_equal(edited[mask()], picture()[mask()])
    written = server.log.read_text().splitlines()
    lines = [json.loads(line) for line in written if line.startswith("{")]  # torch warns about bfloat16 on old CPUs
    told = {line["worker_process"]: line for line in lines if line.get("message") == "loading"}
    assert set(told) == {"0.prepare.1", "0.denoise.1", "0.finish.1"}
    assert all(line["gigabytes"] == line["of"] for line in told.values())
