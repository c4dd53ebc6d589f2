"""The version, of which packaging reads this line."""

VERSION = "0.1.0.dev0"
