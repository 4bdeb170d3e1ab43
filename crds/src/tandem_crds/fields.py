"""The bounded types that fields of the API are made of. Everything a server stores has a limit."""

from typing import Annotated

from pydantic import Field

from .quantity import Quantity

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
LabelKey = Annotated[str, Field(min_length=1, max_length=316, pattern=LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63)]
Quantities = Annotated[dict[Annotated[str, Field(max_length=316)], Quantity], Field(max_length=16)]
Int32 = Annotated[int, Field(json_schema_extra={"format": "int32"})]
Replicas = Annotated[Int32, Field(ge=0, le=1024)]
