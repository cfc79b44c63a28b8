"""The timeline of a step with ControlNets, from the moments of a step."""

import json

from instgenie.bench.controls import StepMoments, local_track, remote_track
from instgenie.bench.timeline import chrome_trace, draw_page
from instgenie.workers.controls import StepTimes


def test_controlnets_beside_the_encoder() -> None:
    first = StepTimes(asked=10.001, started=10.002, ended=10.050, needed=10.040, came=10.051, num_jobs=1)
    second = StepTimes(asked=10.001, started=10.004, ended=10.030, needed=10.040, came=10.041, num_jobs=1)
    track = remote_track("two", StepMoments(10.0, 10.002, 10.100, (first, second)))
    bars = {bar.stream: [] for bar in track.bars}
    for bar in track.bars:
        bars[bar.stream].append((bar.what, round(bar.start), round(bar.end)))
    assert bars["compute"] == [("encoder", 0, 40), ("wait", 40, 51), ("decoder", 51, 100)]
    assert bars["control"] == [("control", 2, 50)]
    assert bars["control 2"] == [("control", 4, 30)]
    assert track.about == "100.0 ms: 64.0 of 74.0 ms of ControlNets beside the encoder, 11.0 waiting"
    page = draw_page("A step", "about", [track])
    assert "ControlNet" in page
    assert "loading for this step" not in page  # the legend has what is drawn
    events = json.loads(chrome_trace([track]))["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == set(bars)


def test_controlnets_before_the_network() -> None:
    track = local_track("one", StepMoments(1.0, 1.03, 1.1, ()))
    assert [(bar.what, round(bar.start), round(bar.end)) for bar in track.bars] == [
        ("control", 0, 30),
        ("unet", 30, 100),
    ]
    assert track.streams == ("compute",)
