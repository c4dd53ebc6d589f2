"""Numbers for people."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """Return bytes in decimal units: ``1234567`` is "1.23 MB"."""
    return scaled_text(count, "B")


def scaled_text(value: float, unit: str = "") -> str:
    """Return a number with three digits and a decimal prefix: ``12345`` is "12.3 k"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":  # 999.5 is rounded to 1000
            break
        value /= 1000
    digits = 0 if abs(value) >= 99.95 or (not prefix and value == int(value)) else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def duration_text(seconds: float) -> str:
    """Return a duration: "0:07", "12:34" or "1:02:03"."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
