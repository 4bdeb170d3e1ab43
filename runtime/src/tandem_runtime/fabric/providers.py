"""Which libfabric providers this machine can use, and which of a list is taken.

Knows: providers by name, and the reason why one does not work. Does not know: what profile asked for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import _core
from .fabric import core_config
from .info import text

if TYPE_CHECKING:
    from collections.abc import Sequence


class ProviderError(Exception):
    """None of the wanted providers works here. The message gives the reason for each."""


@dataclass(frozen=True, slots=True)
class Availability:
    """`reason` is one line: what was found, or what is missing."""

    provider: str
    works: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.provider}: {self.reason}"


def available(
    providers: Sequence[str], bind_address: str | None = None, port_range: tuple[int, int] = (0, 0)
) -> list[Availability]:
    """Ask libfabric for each provider. Nothing is opened.

    libfabric reads its port range once in a process: give the one that the fabric will be opened with.
    """
    ffi, lib = _core.ffi, _core.lib
    result = []
    for provider in providers:
        config, _keep = core_config(provider, bind_address, None, port_range)
        reason = ffi.new("char[512]")
        works = lib.tdm_probe(config, reason, 512)
        result.append(Availability(provider, bool(works), text(reason).removeprefix(f"{provider}: ")))
    return result


def choose_provider(
    providers: Sequence[str], bind_address: str | None = None, port_range: tuple[int, int] = (0, 0)
) -> str:
    """The first of `providers` that works here. Raises ProviderError."""
    tried = available(providers, bind_address, port_range)
    for candidate in tried:
        if candidate.works:
            return candidate.provider
    raise ProviderError(
        "no fabric provider works here; " + "; ".join(map(str, tried)) if tried else "no provider named"
    )
