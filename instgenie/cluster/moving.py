"""Registrations that wait for a worker without a node, and the edits that wait for them, go to other workers."""

from dataclasses import replace

from instgenie.cluster.library import Library
from instgenie.cluster.processes import Worker
from instgenie.scheduling.router import Work


def move_away(library: Library, worker: Worker) -> None:
    """Give the registrations of a worker, and the edits that wait for them, to workers that take edits."""
    placement = library.placement
    if not placement.ready_loads:
        return
    for template in list(library.templates.values()):
        parked = [edit for edit in template.parked if edit.worker == worker.index]
        for edit in parked:
            work = replace(edit.work, must_reuse=True)
            placement.settle(edit, placement.choose([work], library.holders(template.id)))
            library.unpark(template, edit)
        if entry := template.entries.pop(worker.index, None):
            library.registrations.remove(entry)
            placement.process_of(entry).remove(entry)
            if not parked:
                library.register_on(template, placement.choose([Work(template.order.steps, 0, 0, template.id)]))
