"""Plugin for SGLang's diffusion server: stop at a requested step, report what the server holds."""

PROTOCOL = 1
"""Of the requests and answers that this plugin adds; the client refuses another one."""
__version__ = "0.1.0"
