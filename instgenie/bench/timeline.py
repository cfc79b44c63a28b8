"""Timelines of streams or processes as an HTML page and as a Chrome trace. Draws bars; measures nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from instgenie.bench.files import write_text

Stream = Literal["compute", "load", "control", "control 2"]
What = Literal["cached", "dense", "outside", "wait", "load", "ahead", "encoder", "decoder", "unet", "control"]

COLOURS: dict[What, str] = {
    "cached": "#2f6fd0", "dense": "#e08a1e", "outside": "#9aa4b1", "wait": "#d64550", "load": "#2a9d6f",
    "ahead": "#8fd0b4", "encoder": "#2f6fd0", "decoder": "#7b4fc4", "unet": "#5661c9", "control": "#e08a1e",
}  # fmt: skip
MEANINGS: dict[What, str] = {
    "cached": "a cached block", "dense": "dense blocks", "outside": "computation outside blocks",
    "wait": "waiting", "load": "loading for this step", "ahead": "loading for the next step",
    "encoder": "encoder of the UNet", "decoder": "decoder of the UNet", "unet": "UNet", "control": "ControlNet",
}  # fmt: skip
WIDTH, LEFT, RIGHT = 1180, 78, 24
ROW, GAP, HEAD = 26, 5, 34  # heights: of a stream, between streams, of a title


@dataclass(frozen=True)
class Bar:
    """An activity of one stream, in milliseconds from the beginning of the step."""

    stream: Stream
    what: What
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Track:
    """One step under one policy."""

    name: str
    about: str
    step_ms: float
    bars: Sequence[Bar]
    streams: tuple[Stream, ...] = ("compute", "load")


def write_timelines(tracks: Sequence[Track], title: str, about: str, timeline: Path | None, trace: Path | None) -> None:
    """Write the page and the trace to the files that are named, and print their names."""
    if timeline:
        write_text(draw_page(title, about, tracks), timeline)
        print(timeline)
    if trace:
        write_text(chrome_trace(tracks), trace)
        print(trace)


def draw_page(title: str, about: str, tracks: Sequence[Track]) -> str:
    first = min([0.0, *(bar.start for track in tracks for bar in track.bars)])
    last = max(max(track.step_ms, *(bar.end for bar in track.bars)) for track in tracks)
    drawn = "\n".join(draw_track(track, first, last) for track in tracks)
    legend = "".join(
        f'<span><i style="background:{COLOURS[what]}"></i>{escape(meaning)}</span>'
        for what, meaning in MEANINGS.items()
        if any(bar.what == what for track in tracks for bar in track.bars)
    )
    return PAGE.format(title=escape(title), about=escape(about), legend=legend, tracks=drawn)


def draw_track(track: Track, first: float, last: float) -> str:
    num_streams = len(track.streams)
    bottom = HEAD + num_streams * (ROW + GAP) - GAP
    height = bottom + 30

    def x(ms: float) -> float:
        return LEFT + (ms - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    tops = {stream: HEAD + number * (ROW + GAP) for number, stream in enumerate(track.streams)}
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(track.name)}">',
        f'<text x="{LEFT}" y="20" class="name">{escape(track.name)}</text>',
        f'<text x="{LEFT + max(80, 9 * len(track.name))}" y="20" class="about">{escape(track.about)}</text>',
    ]
    for ms in ticks(first, last):
        parts.append(f'<line x1="{x(ms):.1f}" x2="{x(ms):.1f}" y1="{HEAD - 4}" y2="{bottom + 4}" class="grid"/>')
        parts.append(f'<text x="{x(ms):.1f}" y="{bottom + 19}" class="tick">{ms:g} ms</text>')
    for stream, top in tops.items():
        parts.append(f'<text x="{LEFT - 10}" y="{top + ROW / 2 + 4}" class="stream">{stream}</text>')
        parts.append(
            f'<rect x="{x(first):.1f}" y="{top}" width="{x(last) - x(first):.1f}" height="{ROW}" class="lane"/>'
        )
    for bar in track.bars:
        width = max(x(bar.end) - x(bar.start), 0.4)
        gap = 0.6 if width > 2.5 else 0
        parts.append(
            f'<rect x="{x(bar.start):.2f}" y="{tops[bar.stream]}" width="{width - gap:.2f}" height="{ROW}" '
            f'fill="{COLOURS[bar.what]}"><title>{escape(bar.name)}: {bar.end - bar.start:.2f} ms, '
            f"from {bar.start:.2f} to {bar.end:.2f}</title></rect>"
        )
    parts.append(f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{HEAD - 8}" y2="{bottom + 4}" class="edge"/>')
    end = x(track.step_ms)
    parts.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{HEAD - 8}" y2="{bottom + 4}" class="edge"/>')
    return "\n".join([*parts, "</svg>"])


def ticks(first: float, last: float) -> list[float]:
    """Return about ten round numbers."""
    span = last - first
    step = next(s for power in range(-3, 7) for s in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if span / s <= 12)
    return [
        round(count * step, 6) for count in range(round(first / step), int(last / step) + 1) if count * step >= first
    ]


def chrome_trace(tracks: Sequence[Track]) -> str:
    """Return a trace for Perfetto or chrome://tracing, where times are microseconds."""
    events: list[dict[str, object]] = []
    for process, track in enumerate(tracks):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": track.name}})
        for thread, stream in enumerate(track.streams):
            names = {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": stream}}
            events.append(names)
            events += [
                {
                    "ph": "X", "name": bar.name, "cat": bar.what, "pid": process, "tid": thread,
                    "ts": round(1000 * bar.start, 3), "dur": round(1000 * (bar.end - bar.start), 3),
                }
                for bar in track.bars
                if bar.stream == stream
            ]  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 28px 32px 40px; max-width: 1240px; color: #1f2328; background: #fff;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }}
h1 {{ font-size: 22px; margin: 0 0 4px; }}
p {{ margin: 0 0 14px; color: #57606a; max-width: 90ch; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 0 0 10px; font-size: 13px; }}
.legend i {{ display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 6px;
            vertical-align: -2px; }}
svg {{ display: block; width: 100%; height: auto; margin: 0 0 6px; font-size: 12px; }}
.name {{ font-size: 15px; font-weight: 600; fill: #1f2328; }}
.about {{ font-size: 13px; fill: #57606a; }}
.tick {{ text-anchor: middle; fill: #6e7781; font-size: 11px; }}
.stream {{ text-anchor: end; fill: #57606a; }}
.grid {{ stroke: #e4e7eb; }}
.edge {{ stroke: #1f2328; stroke-dasharray: 3 3; }}
.lane {{ fill: #f6f8fa; }}
rect:hover {{ opacity: .75; }}
</style>
<h1>{title}</h1>
<p>{about}</p>
<div class="legend">{legend}</div>
{tracks}
</html>
"""
