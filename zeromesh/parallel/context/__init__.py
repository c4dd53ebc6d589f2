"""Long sequences spread over ranks: attention across them, cutting a batch, and the models that can use it."""
