"""Trains the built-in model: data, autoencoder, transformer, guidance distillation, evaluation."""
