"""Choice of a layout: the space of layouts, the search, and its answer."""
