"""Generated tasks with known answers, their scorers, and perplexity by position. No torch at module level."""
