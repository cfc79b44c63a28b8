"""Measurements: the quality of pictures and the speed of edits."""
