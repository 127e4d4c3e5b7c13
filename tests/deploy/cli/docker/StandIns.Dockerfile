# Replacements of the images that docker-compose.yml pulls, from Debian's packages, for an engine without a registry.
FROM python:3.11-slim-bookworm AS debian
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*

FROM debian AS valkey
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* && install -d -o 999 -g 999 /data

FROM debian AS prometheus
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/* && install -d -o 65534 -g 65534 /prometheus
ENTRYPOINT ["prometheus"]

FROM debian AS redis_exporter
RUN apt-get update && apt-get install -y --no-install-recommends prometheus-redis-exporter && rm -rf /var/lib/apt/lists/* && ln -s /usr/bin/prometheus-redis-exporter /redis_exporter
