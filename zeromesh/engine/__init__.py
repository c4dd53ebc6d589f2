"""The engine: forward, backward and step of a model that is sharded, split or staged."""
