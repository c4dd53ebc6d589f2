"""Machines: devices, links, what is measured of them, and the time of collectives over them."""
