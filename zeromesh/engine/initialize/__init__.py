"""Steps of ``zeromesh.initialize``: checks, layout, preparation, placement."""
