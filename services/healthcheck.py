"""The health check of the images: exits with 0 where the service of this container answers with 200.

usage: healthcheck.py FORAGE__REWARD__HEALTH_ADDRESS /readyz     variable with the address, path

It has the standard library alone, because Docker runs it every few seconds. Where FORAGE__TLS__CA is set it speaks TLS;
it asks its own container, so it checks no certificate, as Kubernetes' probes do not.
"""

from __future__ import annotations

import os
import sys
import urllib.request

TIMEOUT_S = 9


def main(variable: str, path: str) -> None:
    """Ask the service.

    Raises:
        OSError: no answer, or not the status 200.
    """
    listens, _, port = os.environ[variable].rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(listens, listens)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    scheme = "http"
    if os.environ.get("FORAGE__TLS__CA"):
        import ssl

        scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        handlers.append(urllib.request.HTTPSHandler(context=context))
    urllib.request.build_opener(*handlers).open(f"{scheme}://{host}:{port}{path}", timeout=TIMEOUT_S).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
