"""Numbers as people read them."""

from math import floor, log10


def percent(value: float | None, spread: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if spread is None else f"{100 * value:.1f} ± {100 * spread:.1f} %"


def number(value: float | None, spread: float | None = None) -> str:
    """Four significant digits, and the spread to the same decimals. The report's page.js formats it in the same way."""
    if value is None:
        return "-"
    magnitude = abs(value)
    if magnitude and not 1e-4 <= magnitude < 1e6:
        form = ".3e"
    else:
        form = f".{max(0, 3 - floor(log10(magnitude))) if magnitude else 3}f"
    return f"{value:{form}}" if spread is None else f"{value:{form}} ± {spread:{form}}"


def size(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return "-"
    for unit, divisor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= divisor:
            return f"{value / divisor:.1f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """A duration in seconds, minutes, hours and minutes, or days. The report's page.js formats it in the same way."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    total = round(seconds / 60)
    hours, minutes = divmod(total, 60)
    if hours >= 240:
        return f"{total / 1440:.0f} days"
    if hours >= 24:
        return f"{total / 1440:.1f} days"
    return " ".join([f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0))
