"""longchat: chat without end and ask whole books, with a local model and a small KV cache."""

__version__ = "0.1.0"
