"""Many processes that work as one: orders go in, events come out."""
