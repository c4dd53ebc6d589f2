"""The one ZeRO engine: layouts, units, slots, and when states move between their shards and the slots."""
