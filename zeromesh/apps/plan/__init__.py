"""Planning: a model's cost, a machine, memory and time of a layout, and the search for the best one."""
