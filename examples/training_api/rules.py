"""The dataset: made-up rules against money laundering, one JSON object with a `text` a line."""

from __future__ import annotations

import json
import random

DEEDS = ["a cash deposit", "a wire transfer", "a card payment", "a crypto exchange", "an insurance payout"]
PLACES = ["Panama", "Malta", "Cyprus", "Latvia", "Macau", "Belize"]
ALERTS = ["STRUCTURING", "LAYERING", "SMURFING", "ROUND-TRIP", "MULE-ACCOUNT"]


def make(number: int) -> bytes:
    """Return a JSONL file of so many rules; the same each time."""
    draw = random.Random(0)
    lines = [
        f"rule {index:04d}: if {draw.choice(DEEDS)} of more than {draw.randrange(1, 20) * 500} EUR is followed within "
        f"{draw.choice([6, 12, 24, 48])} hours by {draw.choice(DEEDS)} to {draw.choice(PLACES)}, "
        f"raise {draw.choice(ALERTS)}."
        for index in range(number)
    ]
    return "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
