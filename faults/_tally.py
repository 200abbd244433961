"""How many faults the cases of a kind have injected, where one case injects several."""

from collections import Counter

injected: Counter[str] = Counter()
"""The number of faults by what they are, as in {"kills": 12}."""
