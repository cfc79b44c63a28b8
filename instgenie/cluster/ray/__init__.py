"""Workers on the nodes of a Ray cluster. Ray places, restarts and watches; edits travel over ZeroMQ alone, so no call
to Ray lies on the path of an edit.

    connect     join or start Ray, find or create the controller
    controller  the actor that gives slots to nodes, knows the fronts and scales
    slots       slots as Ray knows them: placement groups and node actors
    node        the actor of one slot: starts the slot's processes as its children
    launcher    the launcher of one front
    ledger      the actor that knows who has an idempotency key
    liaison     tells the controller what a front needs, and the front what the controller has decided
    names       names and data that they share
    local       a Ray cluster on this machine, for a trial

A slot is the place of one worker, that is one device. There are as many slots as the load needs; a slot without a node
waits for one. Nothing but this package imports ray.
"""
