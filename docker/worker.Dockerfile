# The image of a machine of the fleet: `runtime worker`, as a user without rights, under an init that passes SIGTERM on.
#
#   runtime image build                      CPU
#   runtime image build --variant cuda       NVIDIA's CUDA image as the base
#   runtime image build --base IMAGE         on an image of yours; its packages stay importable
#
# BASE needs Python 3.11 or newer, or apt-get to install one. The context is the repository; .dockerignore lets in only the
# files that it names. Settings of the package index, which may contain a password, come as the build secret `pip`
# (`--pip-config FILE`) and are in no layer.

ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
ARG TOOLS=docker.io/library/python:3.11.14-slim-bookworm

FROM ${TOOLS} AS tools
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends tini

FROM ${BASE} AS python
USER 0
RUN set -eu; \
    usable() { python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
    usable && [ -s /etc/ssl/certs/ca-certificates.crt ] && exit; \
    command -v apt-get >/dev/null || { echo "error: the base image has no Python 3.11 with venv and certificates, and no apt-get to bring them" >&2; exit 1; }; \
    apt-get update -qq; \
    apt-get install -qq -y --no-install-recommends ca-certificates; \
    usable || apt-get install -qq -y --no-install-recommends python3 python3-venv; \
    rm -rf /var/lib/apt/lists/*; \
    usable || { echo "error: the base image's release has no Python 3.11 or newer" >&2; exit 1; }

FROM python AS build
ARG LOCK=gcp
WORKDIR /src
COPY locks/build.txt locks/${LOCK}.txt locks/
# --no-deps, because the lock is complete (`pip check` reports if not) and older versions of pip fail on its extras.
# --compile, because a setting of the base image may turn it off and every start of every worker would pay for it.
RUN --mount=type=secret,id=pip,target=/run/secrets/pip.conf \
    set -eu; \
    export PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1; \
    unset PYTHONDONTWRITEBYTECODE PIP_USER PIP_TARGET PIP_PREFIX; \
    python3 -m venv /opt/runtime; \
    python3 -m venv /opt/build; \
    /opt/runtime/bin/pip install -q --compile --require-hashes --no-deps -r "locks/${LOCK}.txt"; \
    /opt/runtime/bin/pip check; \
    /opt/build/bin/pip install -q --require-hashes --no-deps -r locks/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY infra infra
COPY runtime runtime
COPY examples/curation examples/curation
# The base image's own packages come last on the path, so that they never replace one of ours.
RUN set -eu; \
    unset PYTHONDONTWRITEBYTECODE PIP_USER PIP_TARGET PIP_PREFIX; \
    /opt/build/bin/python -m hatchling build -t wheel -d /opt/build/dist >/dev/null; \
    /opt/runtime/bin/pip install -q --compile --no-deps --no-index --no-cache-dir --disable-pip-version-check /opt/build/dist/*.whl; \
    python3 -c 'import site; print(*site.getsitepackages(), sep="\n")' \
        >"$(/opt/runtime/bin/python -c 'import site; print(site.getsitepackages()[0])')/base-image.pth"

FROM python AS worker
COPY --from=tools /usr/bin/tini-static /usr/bin/tini
RUN set -eu; \
    echo 'runtime:x:10001:' >>/etc/group; \
    echo 'runtime:x:10001:10001::/home/runtime:/bin/sh' >>/etc/passwd; \
    mkdir -p /home/runtime /work; \
    chown 10001:10001 /home/runtime /work; \
    chmod 0755 /home/runtime /work
COPY --from=build /opt/runtime /opt/runtime
ENV PATH=/opt/runtime/bin:${PATH} HOME=/home/runtime PYTHONUNBUFFERED=1
WORKDIR /work
# By number, so that Kubernetes can check `runAsNonRoot`.
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/runtime/bin/runtime"]
CMD ["worker"]
