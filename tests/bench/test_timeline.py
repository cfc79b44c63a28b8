"""The page of a timeline, from bars."""

import json

from instgenie.bench.timeline import Bar, Track, chrome_trace, draw_page, ticks

BARS = [
    Bar("compute", "dense", "blocks 0 to 3, dense", 0.0, 4.0),
    Bar("compute", "wait", "waits for block 4", 4.0, 4.5),
    Bar("compute", "cached", "block 4, cached", 4.5, 5.0),
    Bar("load", "load", "loads block 4", -1.0, 4.5),
    Bar("load", "ahead", "loads block 4 for the next step", 4.5, 9.0),
]


def test_every_bar_is_drawn_and_named() -> None:
    page = draw_page("A <title>", "about", [Track("exact", "5 ms", 5.0, BARS)])
    assert page.count("<title>") == 1 + len(BARS)
    assert "A &lt;title&gt;" in page
    assert "waits for block 4: 0.50 ms, from 4.00 to 4.50" in page


def test_a_trace_has_every_bar_in_microseconds() -> None:
    events = json.loads(chrome_trace([Track("exact", "", 5.0, BARS), Track("cached", "", 5.0, BARS[:1])]))[
        "traceEvents"
    ]
    bars = [event for event in events if event["ph"] == "X"]
    assert [(bar["pid"], bar["tid"], bar["ts"], bar["dur"]) for bar in bars] == [
        (0, 0, 0, 4000), (0, 0, 4000, 500), (0, 0, 4500, 500), (0, 1, -1000, 5500), (0, 1, 4500, 4500), (1, 0, 0, 4000),
    ]  # fmt: skip


def test_ticks_are_round_and_few() -> None:
    assert ticks(-3.0, 47.0) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert ticks(-0.4, 1.1) == [-0.4, -0.2, 0, 0.2, 0.4, 0.6, 0.8, 1.0]
