"""Measures trained pipeline folders on photographs and scenes kept out of training."""
