"""The HTTP process: OpenAI's images API and operators' endpoints in front of a cluster. It imports no torch.

`options` and `config` turn flags, environment variables and a TOML file into one frozen configuration; `serve` runs the
process from start to SIGTERM; `app` joins the routes; `service` holds what they share. A request passes `guard`, is
handled by a module of `routes` with the help of `bodies`, and is followed to its end by `watch`. `monitoring` watches
all of it.
"""
