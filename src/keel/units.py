"""Numbers as people read them."""


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


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
