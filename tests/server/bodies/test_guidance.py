"""Sentences about guidance in parallel."""

from dataclasses import replace

from instgenie.cluster.orders import Facts, GuidanceFacts
from instgenie.server.bodies.guidance import guidance_notes

FACTS = Facts(
    seed=0,
    width=64,
    height=64,
    num_tokens=16,
    num_masked_tokens=4,
    num_computed_tokens=4,
    cache_tier=None,
    worker=0,
    num_attempts=1,
    queue_seconds=0.0,
    prepare_seconds=0.0,
    denoise_seconds=0.0,
    dense_seconds=0.0,
    finish_seconds=0.0,
    finish_thread_seconds=0.0,
)


def notes_of(*guidance: GuidanceFacts | None) -> list[str]:
    return guidance_notes([replace(FACTS, guidance=one) for one in guidance])


def test_an_answer_says_what_the_companion_did() -> None:
    two = "The two branches of its guidance were computed on two devices."
    assert notes_of(None) == []
    assert notes_of(None, GuidanceFacts()) == [two]
    why = "because the process that computes the second branch had died."
    assert notes_of(GuidanceFacts(1)) == [two, f"A step was repeated, {why}"]
    assert notes_of(GuidanceFacts(1), GuidanceFacts(2)) == [two, f"3 steps were repeated, {why}"]
    assert notes_of(GuidanceFacts(is_alone=True))[1].startswith("The last steps were computed on one device")
