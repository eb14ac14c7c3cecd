"""Turns a web application into one that answers only who has the token, and only by this machine's own names.

Knows the rules by which a page on 127.0.0.1 stays private, and ASGI. Must not know what the application shows.

A web page that the user visits elsewhere may send requests to 127.0.0.1 too:

    no token, or another                  -> 401
    Host: attacker.example                -> 400: its name may have been made to lead here (DNS rebinding)
    Origin: https://attacker.example      -> 403: the request comes from a script of another site
    POST                                  -> 405: nothing is changed here
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]

OWN_NAMES = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""Any port: `ssh -L` forwards from a port of its own."""

HEADERS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


def guard_application(app: App, token: str, policy: str) -> App:
    """An application behind the rules above.

    Args:
      app: the application.
      token: who has it may read.
      policy: the Content-Security-Policy of every answer.

    Returns:
      An application.
    """
    headers = [*HEADERS, (b"content-security-policy", policy.encode())]

    async def guard(scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        if scope["type"] != "http":  # pages open no websockets
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        refused = refusal(scope, token)
        if refused is None:
            await app(scope, receive, send_with_headers)
            return
        status, words = refused
        kind = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(words.encode()))]
        extra = {401: [(b"www-authenticate", b"Bearer")], 405: [(b"allow", b"GET, HEAD")]}.get(status, [])
        await send_with_headers({"type": "http.response.start", "status": status, "headers": kind + extra})
        body = b"" if scope["method"] == "HEAD" else words.encode()
        await send_with_headers({"type": "http.response.body", "body": body})

    return guard


def refusal(scope: Message, token: str) -> tuple[int, str] | None:
    """The status and the words that refuse a request, or None if it is let in."""
    hosts, origins, authorizations = (
        [value for name, value in scope["headers"] if name == wanted]
        for wanted in (b"host", b"origin", b"authorization")
    )
    if len(hosts) != 1 or not OWN_NAMES.fullmatch(hosts[0]):
        return 400, "This page is reached by the names 127.0.0.1, localhost and [::1] only. Forward a port: ssh -L.\n"
    if any(origin != b"http://" + hosts[0] for origin in origins):
        return 403, "Scripts of other sites may not read this page.\n"
    if scope["method"] not in ("GET", "HEAD"):
        return 405, "This page can only be read.\n"
    given = [value.partition(b" ")[2].strip() for value in authorizations if value[:7].lower() == b"bearer "]
    query = parse_qs(scope["query_string"].decode("latin-1"), encoding="latin-1")
    given += [value.encode() for value in query.get("token", [])]
    if not any(hmac.compare_digest(one, token.encode()) for one in given):
        words = "The address lacks the token: open the whole address that the scheduler printed when it started.\n"
        return 401, words
    return None
