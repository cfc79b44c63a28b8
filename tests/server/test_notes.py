"""Notes: sentences in the answer that say how a request was read, where that may surprise."""

from helpers.serving import Running, edit

OPAQUE = "What is painted is opaque: this model paints no transparent background."


def test_an_answer_says_what_a_value_could_not_do(server: Running) -> None:
    assert OPAQUE in edit(server, background="transparent").notes
    assert edit(server, background="auto").notes == []


def test_a_stream_ends_with_the_notes(server: Running) -> None:
    *_, last = edit(server, background="transparent", stream=True)
    assert last.type == "image_edit.completed"
    assert OPAQUE in last.notes
