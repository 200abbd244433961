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
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}:{minutes:02d} h" if hours else f"{minutes} min"
