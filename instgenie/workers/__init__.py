"""The processes of a worker: prepare, denoise, finish."""
