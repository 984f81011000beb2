# The image of the head and the TPU nodes of a Ray cluster: Ray, the libraries of the TPUs, and `runtime`.
#
#   runtime image build --file docker/cluster.Dockerfile
#
# The machines' units start `ray start` and `runtime cluster reap` in it, and pin it by digest. Head and nodes must hold the
# same Python and the same Ray, so there is one image for both. Ray's autoscaler reaches the nodes over SSH.

ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS system
USER 0
RUN set -eu; \
    apt-get update -qq; \
    apt-get install -qq -y --no-install-recommends ca-certificates openssh-client rsync tini; \
    python3 -c 'import ensurepip, venv' 2>/dev/null || apt-get install -qq -y --no-install-recommends python3-venv; \
    rm -rf /var/lib/apt/lists/*

FROM system AS packages
ARG LOCK=cluster
WORKDIR /src
COPY locks/build.txt locks/${LOCK}.txt locks/
# The same options as in worker.Dockerfile: --no-deps since the lock is complete, --compile to override the base image's settings.
RUN --mount=type=secret,id=pip,target=/run/secrets/pip.conf \
    set -eu; \
    export PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1; \
    unset PYTHONDONTWRITEBYTECODE PIP_USER PIP_TARGET PIP_PREFIX; \
    python3 -m venv /opt/runtime; \
    python3 -m venv /opt/build; \
    /opt/runtime/bin/pip install -q --compile --require-hashes --no-deps -r "locks/${LOCK}.txt"; \
    /opt/runtime/bin/pip check; \
    /opt/build/bin/pip install -q --require-hashes --no-deps -r locks/build.txt

FROM packages AS build
COPY pyproject.toml README.md LICENSE ./
COPY infra infra
COPY runtime runtime
COPY examples/curation examples/curation
RUN /opt/build/bin/python -m hatchling build -t wheel -d /opt/build/dist >/dev/null

FROM system AS cluster
RUN set -eu; \
    echo 'ray:x:10001:' >>/etc/group; \
    echo 'ray:x:10001:10001::/home/ray:/bin/bash' >>/etc/passwd; \
    mkdir -p /home/ray; \
    chown 10001:10001 /home/ray; \
    chmod 0755 /home/ray
# `runtime` comes in layers of its own, so that a new version of it leaves the one with Ray and the TPUs' libraries as it is.
# The wheel is copied and not mounted: buildah takes a cached layer of a RUN without looking at what its mounts hold.
COPY --from=packages /opt/runtime /opt/runtime
COPY --from=build /opt/build/dist /opt/dist
RUN set -eu; \
    unset PYTHONDONTWRITEBYTECODE PIP_USER PIP_TARGET PIP_PREFIX; \
    /opt/runtime/bin/pip install -q --compile --no-deps --no-index --no-cache-dir --disable-pip-version-check /opt/dist/*.whl; \
    rm -r /opt/dist
# Without this variable Ray reports usage statistics to its makers.
ENV PATH=/opt/runtime/bin:${PATH} HOME=/home/ray PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
WORKDIR /home/ray
# The units of the machines run containers as root if a TPU's device needs it; nothing else needs root.
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["ray", "--help"]
