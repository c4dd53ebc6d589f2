"""The application behind ``zeromesh train``: data, decoder, loop, samples, export. Nothing in the engine imports it."""
