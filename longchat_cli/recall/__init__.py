"""Finding what a question needs in texts longer than the model's window (`recall` in the docs)."""
