"""The base of every section of the settings, and the types that sections share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field

_CHAIN = re.compile(r"::(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9a-f:.%]*\]|[^:@\[\]\s]*)(:\d{1,5})?", re.IGNORECASE)
_IS_REDIS = re.compile(r"rediss?(\+|$)|unix$", re.IGNORECASE)
_IS_WEB = re.compile(r"https?$", re.IGNORECASE)

_FUNCTION = r"(.+\.py|[^\W\d][\w.]*):[^\W\d]\w*"


def is_function_name(source: str) -> bool:
    """Whether it is FILE.py:FUNCTION or MODULE:FUNCTION."""
    return bool(re.fullmatch(_FUNCTION, source))


def _check_function(source: str) -> str:
    if source and not is_function_name(source):
        raise ValueError("expected FILE.py:FUNCTION or MODULE:FUNCTION, such as my_code.py:leave_one_out")
    return source


FunctionName = Annotated[str, AfterValidator(_check_function)]
"""A function of the user's own, FILE.py:FUNCTION or MODULE:FUNCTION; empty: none."""


def check_address(address: str, other: str = "") -> str:
    """Refuse what is not "host:port".

    Args:
        other: pattern of what else it may be.

    Raises:
        ValueError: it is not.
    """
    if other and re.fullmatch(other, address):
        return address
    host, _, port = address.rpartition(":")
    try:
        if host.startswith("["):
            IPv6Address(host[1:-1])
        host.encode("idna")  # as whoever connects does
        is_one = bool(re.fullmatch(ADDRESS, address))
    except ValueError:
        is_one = False
    if not is_one:
        raise ValueError("expected host:port, an address of IPv6 in brackets: 127.0.0.1:18610 or [::1]:18610")
    if int(port) > 65535:
        raise ValueError(f"there is no port {port}: give one up to 65535")
    return address


def check_url(url: object) -> object:
    """Refuse a URL whose login or port is read as another part of it; the sentence quotes nothing, it may be a secret.

    Raises:
        ValueError: it is such a one.
    """
    for part in _CHAIN.split(url) if isinstance(url, str) else ():
        scheme, _, rest = part.partition("://")
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
        later, (login, _, hosts) = rest[len(authority) :], authority.rpartition("@")
        is_redis, is_web = bool(_IS_REDIS.match(scheme)), bool(_IS_WEB.match(scheme))
        is_cut = not _HOST.fullmatch(authority) or later[:1] == "#" or (is_redis and (authority or scheme != "unix"))
        if re.search(r"[\s\[\]\\]", login) or ("@" in later and is_cut):
            remedy = ", or leave the password out and set redis.password_file" if is_redis else ""
            raise ValueError(
                "its user or password has a character that ends it, and another host would be meant: percent-encode "
                f"both (/ is %2F, # is %23, ? is %3F, @ is %40){remedy}"
            )
        try:
            for host in hosts.split(",") if is_redis or is_web else ():
                urlsplit(f"//{host}").port  # noqa: B018 - raises where it is none
            if is_web and not urlsplit(f"//{hosts}").hostname:
                raise ValueError
            urlsplit(part if login else "")
        except ValueError:  # which quotes it
            raise ValueError("it has no host and port that can be read: expected host:port, up to 65535") from None
    return url


Url = Annotated[str, BeforeValidator(check_url)]


def check_web(url: str) -> str:
    """
    Raises:
        ValueError: it is no address of the web, nor empty.
    """
    if not re.match(_WEB, url):
        raise ValueError("expected an address such as http://host:8080 or https://host")
    return url


_WEB = r"^https?://[^\s]+$"


def _check_model(model: str) -> str:
    return check_web(model) if "://" in model else model


ModelSource = Annotated[str, BeforeValidator(check_url), AfterValidator(_check_model)]
"""A model: its folder or another name of it, or the web address of a server that has it."""


def find_server(model: str) -> str:
    """The address in a `ModelSource`; empty: it is a model of this machine."""
    return model if "://" in model else ""


ADDRESS = r"([^:/\s\[\]]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}"
# A string in the annotation names the type in descriptions.
Address = Annotated[
    str, AfterValidator(check_address), Field(json_schema_extra={"pattern": f"^{ADDRESS}$"}), "host:port"
]
# Whose parameters they are checks them, and names what it expected.
Params = Annotated[dict[str, Annotated[float, AllowInfNan(True)] | int | str | bool], "map of values"]

Device = Annotated[
    Literal["auto", "cpu", "gpu", "cuda"], AfterValidator(lambda device: "gpu" if device == "cuda" else device)
]
"""Where a service computes: auto, cpu or gpu; cuda is another word for gpu, and is read as such."""


class Number(NamedTuple):
    """A number that a map holds under a name: its default (None: it must be given), and which values it takes."""

    default: float | None
    expected: str = "a number"
    is_valid: Callable[[float], bool] = math.isfinite

    def check(self, name: str, value: float) -> None:
        """
        Raises:
            ValueError: it is another value.
        """
        if not self.is_valid(value):
            raise ValueError(f"{name} is {value:g}: expected {self.expected}")


class Section(BaseModel):
    """A node of the tree: immutable, closed to unknown keys, and without numbers that are infinite or none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, ser_json_inf_nan="constants"
    )
