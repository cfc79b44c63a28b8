"""Reports of a worker on its templates: forgotten, evicted, listed, recalled."""

from pathlib import Path

from helpers.edits import make_edit
from helpers.workers import SIZE, files, head_of, make_denoiser, memory_status, register_on_disk, registering

from instgenie.cluster import wire
from instgenie.models.model import Model


def test_forgotten_templates_leave_every_tier(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path / "disk", "t", "u")
    denoiser, tape = make_denoiser(small, disk=str(tmp_path / "disk"), remote=(tmp_path / "remote").as_uri())
    tape.rounds.append([(wire.Forget(head_of("t")), [])])
    denoiser.run()
    reports = [*tape.of(wire.Forgotten), *(message for message, _ in denoiser.templates.reports())]
    assert wire.Forgotten(head_of("t").id) in reports
    [kept] = [message for message in reports if isinstance(message, wire.Kept) and message.template == head_of("t").id]
    assert kept.template_bytes == {}
    assert kept.tier_bytes["disk"] > 0
    assert {path.parent.name for path in files(tmp_path / "disk")} == {denoiser.templates.keys.find(head_of("u")).name}


def test_evicted_templates_are_reported(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t")
    [num_bytes] = {tier.num_bytes for tier in memory_status(small, tmp_path, "t")}
    denoiser, tape = make_denoiser(small, host_bytes=num_bytes)
    tape.rounds.append([registering(small, "t"), registering(small, "u")])
    denoiser.run()
    reports = [*tape.of(wire.Kept), *(message for message, _ in denoiser.templates.reports())]
    last = {message.template: message.template_bytes for message in reports if isinstance(message, wire.Kept)}
    assert last[head_of("t").id] == {}
    assert last[head_of("u").id] == {"host": num_bytes}


def test_templates_that_outlive_a_process_are_listed_and_their_pictures_recalled(small: Model, tmp_path: Path) -> None:
    register_on_disk(small, tmp_path, "t", "u", steps=8)
    files(tmp_path)[0].unlink()
    denoiser, tape = make_denoiser(small, disk=str(tmp_path))
    heads = [head_of(name, steps=8) for name in "tuv"]
    tape.rounds.append(
        [(wire.List("these"), []), (wire.List("others"), []), *((wire.Recall(head), []) for head in heads)]
    )
    tape.is_busy = lambda: len(tape.of(wire.Listed)) < 2 or len(tape.of(wire.Recalled)) < 3
    denoiser.run()
    [these, others] = sorted(tape.of(wire.Listed), key=lambda listed: -len(listed.templates))
    assert others == wire.Listed("others", ())
    listings = {listing.template.picture: listing for listing in these.templates}
    assert {name: listing.picture for name, listing in listings.items()} == {"t": SIZE, "u": SIZE}
    assert sorted(listing.num_registered_steps for listing in listings.values()) == [4, 8]
    assert all(listing.tier_bytes["disk"] > 0 for listing in listings.values())
    assert [denoiser.templates.keys.find(listing.template) for listing in listings.values()] == [
        denoiser.templates.keys.find(head_of(name, steps=8)) for name in listings
    ]
    recalled = {
        message.template: (message.size, frames) for message, frames in tape.sent if isinstance(message, wire.Recalled)
    }
    assert recalled[heads[2].id] == (None, [])
    size, [frame] = recalled[heads[0].id]
    assert size is not None
    assert (wire.read_picture(frame, size) == make_edit(size=SIZE).picture).all()
