"""Times as Kubernetes writes them: RFC 3339 in UTC, whole seconds. Inside, a time is Unix seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def text(at_s: float) -> str:
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(written: str) -> float:
    return datetime.fromisoformat(written).timestamp()
