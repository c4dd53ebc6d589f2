"""Text to tokens to samples: the corpus, the token files, and a loader that resumes by counting."""
