"""Many processes as one: orders go in, events come out."""
