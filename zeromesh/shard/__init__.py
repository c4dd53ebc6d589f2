"""The one ZeRO engine: layouts, units, slots, and when states move between their homes and the slots."""
