"""Following of split activations through code that nobody knows, and the checks that it is right."""

from zeromesh.parallel.follow import split_views as split_views  # which registers rules, as those that it imports do
